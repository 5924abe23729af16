"""`python -m ort_moe.cli`, for where the script is not on the path."""

from __future__ import annotations

from ort_moe.cli import main

main()
