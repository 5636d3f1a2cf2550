"""``splitcheck`` as a package of its own: the proof that it could leave the house.

    python -m tests.harness.splitcheck_wheel FOLDER

It writes a wheel with the files that an import of ``scatterpar.splitting`` runs, under
the name ``splitcheck``, and prints what it contains. The wheel has an ``__init__`` of
its own, with the public names of ``scatterpar.splitting``.
"""

import argparse
import base64
import hashlib
import re
import zipfile
from pathlib import Path

import scatterpar
from scatterpar import splitting
from tests.harness.boundaries import PACKAGE, imports_of_imports
from tests.harness.pages import SETUP
from tests.size import tokens_in

NAME = "splitcheck"
INIT = '''"""Is the gradient of any training loop that of the whole batch?"""

from {name}.splitting import {names}

__all__ = {names_as_list}
'''
METADATA = """Metadata-Version: 2.1
Name: {name}
Version: {version}
Requires-Python: {python}
Requires-Dist: {torch}
"""
WHEEL = """Wheel-Version: 1.0
Generator: {name}
Root-Is-Purelib: true
Tag: py3-none-any
"""


def files_alone():
    """The text of each file of the package that is left, by its place in it."""
    texts = {}
    for path in sorted(imports_of_imports(PACKAGE / "splitting" / "__init__.py")):
        text = path.read_text(encoding="utf-8")
        renamed = re.sub(r"\bscatterpar\b", NAME, text)
        texts[f"{NAME}/{path.relative_to(PACKAGE).as_posix()}"] = renamed
    texts[f"{NAME}/__init__.py"] = INIT.format(
        name=NAME,
        names=", ".join(splitting.__all__),
        names_as_list=splitting.__all__,
    )
    return texts


def write_wheel(folder):
    """Write the wheel into a folder. Returns its path."""
    version = scatterpar.__version__
    information = f"{NAME}-{version}.dist-info"
    texts = files_alone()
    texts[f"{information}/METADATA"] = METADATA.format(
        name=NAME,
        version=version,
        python=SETUP["options"]["python_requires"],
        torch=SETUP["options"]["install_requires"].strip(),
    )
    texts[f"{information}/WHEEL"] = WHEEL.format(name=NAME)
    record = f"{information}/RECORD"
    texts[record] = "".join(f"{_entry(*item)}\n" for item in texts.items())
    texts[record] += f"{record},,\n"
    path = Path(folder) / f"{NAME}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in texts.items():
            archive.writestr(name, text)
    return path


def _entry(name, text):
    """The line of a file in the wheel's record."""
    data = text.encode("utf-8")
    digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=")
    return f"{name},sha256={digest.decode()},{len(data)}"


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    texts = files_alone()
    for name, text in texts.items():
        print(f"{tokens_in(text):6,} {name}")
    total = sum(map(tokens_in, texts.values()))
    print(f"{total:6,} tokens in {len(texts)} files of {write_wheel(folder)}")


if __name__ == "__main__":
    main()
