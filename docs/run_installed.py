"""README and the quickstart with the package that this Python has installed: see `make package`."""

import os
import re
import runpy
import sys
import tempfile
from pathlib import Path

import pyro_ngvi

ROOT = Path(__file__).parents[1]

home = Path(pyro_ngvi.__file__).resolve()
assert Path(sys.prefix).resolve() in home.parents, f"{home} is not the installed package"
os.chdir(tempfile.mkdtemp())  # nothing of the checkout is needed, or reached by chance

readme = (ROOT / "README.md").read_text(encoding="utf-8")
exec("\n".join(re.findall(r"^```python\n(.*?)^```", readme, flags=re.M | re.S)), {})

sys.argv = ["quickstart.py", "--steps", "30"]
runpy.run_path(str(ROOT / "docs" / "quickstart.py"), run_name="__main__")
