from diloco.cli.main import main


def test_text_is_prepared_in_a_directory(tmp_path, capsys):
    (tmp_path / "text.txt").write_text("one two three " * 100)
    (tmp_path / "held.txt").write_text("four five six " * 20)
    sources = ["--train", str(tmp_path / "text.txt"), "--held-out", str(tmp_path / "held.txt")]
    main(["data", "prepare", "--output", str(tmp_path / "prepared"), *sources])
    assert "train: 1 documents, 1,401 tokens" in capsys.readouterr().out
    assert (tmp_path / "prepared" / "index.json").exists()
