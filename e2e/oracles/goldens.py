"""Reads the goldens of extproc/kvtransfer/testdata: the bytes that Tandem sends, as its own tests hold them."""
import json
import os
import pathlib
import re


def read(path: pathlib.Path) -> dict:
    """A txtar file: its first line as path, and each of its files by name."""
    first, rest = path.read_text().split("\n", 1)
    parts = re.split(r"^-- (.+) --$", rest, flags=re.M)
    out = {name: text.strip() for name, text in zip(parts[1::2], parts[2::2])}
    out["path"] = re.match(r"POST ([^,\s]+)", first).group(1)
    out["first"] = first
    out["name"] = f"{path.parent.name}/{path.stem}"
    return out


ENCODE = "encode stage"
FOLDERS = {ENCODE: "../../testdata/encode"}  # no dialect: it goes before one


def of(testdata: str, dialect: str) -> list:
    files = sorted(pathlib.Path(testdata, FOLDERS.get(dialect, dialect)).glob("*.txtar"))
    if not files:
        raise SystemExit(f"no goldens of {dialect} in {testdata}")
    return [read(f) for f in files]


def body(golden: dict, leg: str):
    """A leg's body as the engine's JSON parser has it, None where the golden has no such leg."""
    text = golden.get(leg + " request")
    return json.loads(text) if text else None


def dump(value) -> str:
    return json.dumps(value, ensure_ascii=False)


def rename(value, name: str):
    """value with every member called name called otherwise, at any depth."""
    if isinstance(value, dict):
        return {(k + "_renamed" if k == name else k): rename(v, name) for k, v in value.items()}
    if isinstance(value, list):
        return [rename(v, name) for v in value]
    return value


def cell(dialect: str) -> str:
    """A dialect's first cell in a table."""
    return dialect if dialect in FOLDERS else f"`{dialect}`"


class Judgement:
    """Runs oracles over goldens: each must accept what Tandem sends, and none may accept it with one name changed."""

    def __init__(self, testdata: str):
        self.testdata, self.rows, self.results, self.wrong = testdata, [], [], []

    def dialect(self, name: str, release: str, judge: str, check, names: dict, skip=()):
        """check(golden, leg, body) raises where the engine would not understand the body. names are, for each leg, the members that
        the engine cannot do without; a tuple are members of which one is enough. Where the client's own part is refused by every
        engine (the golden refused-by-prefill), both legs have to be."""
        accepted = caught = 0
        for golden in of(self.testdata, name):
            if golden["name"].split("/")[1] in skip:
                continue
            if golden["name"].endswith("/refused-by-prefill"):
                self.refused(golden, check, names)
                continue
            for leg, must in names.items():
                sent = body(golden, leg)
                if sent is None:
                    continue
                try:
                    if check(golden, leg, sent) is False:
                        continue  # a leg without parameters: D computes the prompt
                    accepted += 1
                except Exception as e:  # noqa: BLE001 - whatever the engine raises
                    self.wrong.append(f"{golden['name']}, {leg}: {type(e).__name__}: {e}")
                    continue
                for member in must:
                    changed = json.loads(json.dumps(sent))
                    for one in member if isinstance(member, tuple) else (member,):
                        changed = rename(changed, one)
                    if changed == sent:
                        continue
                    try:
                        noticed = check(golden, leg, changed) is False
                    except Exception:  # noqa: BLE001
                        noticed = True
                    if noticed:
                        caught += 1
                        continue
                    self.wrong.append(f"{golden['name']}, {leg}: nobody noticed that {member} was renamed")
        if not accepted or not caught:
            self.wrong.append(f"{name}: no golden was judged, or no change noticed")
        self.rows.append(f"| {cell(name)} | {judge} | {release} | {accepted} | {caught} |")
        self.results.append((release, name, f"passed: {accepted} bodies accepted, {caught} changes noticed"))

    def refused(self, golden: dict, check, names: dict):
        for leg in names:
            try:
                check(golden, leg, body(golden, leg))
            except AssertionError as e:
                self.wrong.append(f"{golden['name']}, {leg}: the engine did not refuse it: {e}")
            except Exception:  # noqa: BLE001 - the engine's refusal
                continue
            else:
                self.wrong.append(f"{golden['name']}, {leg}: the engine did not refuse it")

    def matrix(self):
        """A row for each dialect of a release: passed, or what changed first."""
        for release, name, result in self.results:
            folder = pathlib.Path(FOLDERS.get(name, name)).name
            if wrong := [w for w in self.wrong if w.startswith((folder + "/", folder + ":"))]:
                result = f"changed ({len(wrong)}): {wrong[0]}".replace("\n", " ").replace("|", "\\|")[:300]
            print(f"| {release} | {cell(name)} | {result} |")

    def end(self):
        if os.environ.get("TANDEM_MATRIX"):
            self.matrix()
            raise SystemExit(1 if self.wrong else 0)
        print("\n".join(self.rows))
        for line in self.wrong:
            print("WRONG", line)
        raise SystemExit(1 if self.wrong else 0)
