"""Figures as SVG and PNG files."""
