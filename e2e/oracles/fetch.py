#!/usr/bin/env python3
"""Fetches the files of a release from PyPI, as they are: nothing is built, no dependency is asked for, no compiled file is kept.

usage: fetch.py DIRECTORY NAME[==VERSION][~COUNT] [PART...]

NAME alone is the newest release, NAME~2 the newest two. Of each, files whose path has one of PARTs in it go to
DIRECTORY/NAME-VERSION (all of them, if there is none), from the sdist or else a wheel, held to the index's checksum. Prints NAME, VERSION and directory of each release, tabs between. What is there already is not fetched again."""
import hashlib
import io
import pathlib
import re
import sys
import tarfile
import urllib.parse
import urllib.request
import zipfile


def listed(name: str) -> dict:
    """Releases without a or b or rc, oldest first: each with addresses of its archives and their checksums."""
    index = f"https://pypi.org/simple/{name}/"
    with urllib.request.urlopen(index) as answer:
        page = answer.read().decode()
    releases: dict = {}
    for link, archive, digest in re.findall(r'href="([^"#]*/([^"#/]+))#sha256=([0-9a-f]{64})"', page):
        found = re.match(rf"{name.replace('-', '[-_]')}-(\d[\d.]*(?:\.post\d+)?)(?:-.*\.whl|\.tar\.gz)$", archive)
        if found:
            releases.setdefault(found[1], []).append((urllib.parse.urljoin(index, link), digest))
    return dict(sorted(releases.items(), key=lambda r: [int(n) for n in re.findall(r"\d+", r[0])]))


def files(address: str, data: bytes):
    """The files in an archive, by their path; in an sdist, below its only folder."""
    if address.endswith(".whl"):
        with zipfile.ZipFile(io.BytesIO(data)) as wheel:
            yield from ((n, wheel.read(n)) for n in wheel.namelist() if not n.endswith((".so", "/")))
        return
    with tarfile.open(fileobj=io.BytesIO(data)) as sdist:
        for member in sdist:
            if member.isfile():
                yield member.name.split("/", 1)[1], sdist.extractfile(member).read()


def fetch(archives: list, target: pathlib.Path, parts: list) -> None:
    # A wheel has kernels for a gigabyte with some engines, an sdist never.
    address, digest = min(archives, key=lambda a: (not a[0].endswith(".tar.gz"), "aarch64" in a[0]))
    with urllib.request.urlopen(address) as answer:
        data = answer.read()
    if hashlib.sha256(data).hexdigest() != digest:
        sys.exit(f"{address} is not what the index lists")
    for name, text in files(address, data):
        if not parts or any(p in name for p in parts):
            path = target / name
            if not path.resolve().is_relative_to(target.resolve()):
                sys.exit(f"{address} has a file {name}")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(text)
    (target / ".fetched").write_text(address + "\n")


def main() -> None:
    directory, wanted, *parts = sys.argv[1:]
    name, version, count = re.fullmatch(r"([\w-]+)(?:==([\w.]+))?(?:~(\d+))?", wanted).groups()
    releases = listed(name)
    if version and version not in releases:
        sys.exit(f"PyPI lists no release {version} of {name}")
    for v in [version] if version else list(releases)[-int(count or 1):]:
        target = pathlib.Path(directory, f"{name}-{v}")
        if not (target / ".fetched").exists():
            fetch(releases[v], target, parts)
        print(name, v, target, sep="\t")


if __name__ == "__main__":
    main()
