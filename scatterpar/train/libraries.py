"""Imports of torchvision and timm, and names that are similar to a wrong one."""

from __future__ import annotations

import difflib
import importlib
import re
import socket
import sys
import urllib.parse
import urllib.request
from collections.abc import Iterable
from typing import Any

import torch

from scatterpar.train.command_line import UsageError, words_of

INSTALL = "pip install -c constraints.txt"
_WHEELS = "https://download.pytorch.org/whl/cpu"
# The hub's server answers in a tenth of a second; a slow line may need more.
_SECONDS_TO_ANSWER = 3.0
# The error of PyPI's torchvision, which is built for CUDA, beside torch's CPU build.
_MISMATCH = "torchvision::nms does not exist"


def library(module: str) -> Any:
    """Import a module of torchvision or timm, even if torchvision was built for another
    torch.

    Then its operators for object detection are missing; the import succeeds if their
    names exist.
    """
    try:
        importlib.import_module("torchvision.ops")
        return importlib.import_module(module)
    except (ImportError, RuntimeError) as error:
        if _MISMATCH not in str(error):
            wheels = "" if torch.version.cuda else f"--extra-index-url {_WHEELS} "
            raise UsageError(
                "this needs torchvision, built for this torch, and timm; where you "
                f"cloned scatterpar run: {INSTALL} {wheels}-e '.[images]' "
                f"({words_of(error)})"
            ) from error
    for name in ("nms", "qnms"):
        torch.library.define(f"torchvision::{name}", "(Tensor x) -> Tensor")
    for name in list(sys.modules):
        if name.partition(".")[0] == "torchvision":
            del sys.modules[name]
    return library(module)


def installed(module: str, extra: str) -> Any:
    """Import a module of a package that an extra of scatterpar installs. The import is
    late, because few runs need the package, and it takes long.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UsageError(
            f"{words_of(error)} ({INSTALL} -e '.[{extra}]' where you cloned scatterpar)"
        ) from error


def stay_offline_without_network() -> None:
    """Let Hugging Face's hub use its cache only, if its server does not answer.

    The hub would try for a minute before it says so, even if the file is cached.
    """
    constants: Any = importlib.import_module("huggingface_hub.constants")
    if urllib.request.getproxies():  # the server may be reached by a proxy only
        return
    server = urllib.parse.urlsplit(constants.ENDPOINT)
    try:
        address = server.hostname, server.port or 443
        socket.create_connection(address, _SECONDS_TO_ANSWER).close()
    except OSError:
        constants.HF_HUB_OFFLINE = True


def suggestion(name: str, known: Iterable[str], prefix: str = "") -> str:
    """Return ``"; did you mean …?"`` with the known names that are similar to `name`,
    or nothing. Case and signs do not count: ResNet-18 is resnet18.
    """
    by_letters = dict[str, str]()
    for text in known:
        by_letters.setdefault(_letters(text), text)
    similar = difflib.get_close_matches(_letters(name), by_letters, n=3)
    if not similar:
        return ""
    names = ", ".join(prefix + by_letters[text] for text in similar)
    return f"; did you mean {names}?"


def _letters(name: str) -> str:
    """Return the letters and digits of a name, without those of its library."""
    base = re.sub(r"^.*[:/]|^(timm|torch\w*)\.", "", name)
    return re.sub("[^a-z0-9]", "", base.lower()) or name
