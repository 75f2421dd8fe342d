"""Puts the vendored version that requirements.txt asks for on the path."""
import pathlib
import sys

_root = pathlib.Path(__file__).resolve().parent.parent
for _line in (_root / "requirements.txt").read_text().splitlines():
    if "==" in _line:
        _name, _version = _line.strip().split("==")
        sys.path.insert(0, str(_root / "vendor" / f"{_name}-{_version}"))
