#!/usr/bin/env python3
"""Draws sentences at random, to read them as a newcomer would (CONTRIBUTING.md): of comments of the Go code, or with -docs
of the documentation.

usage: scripts/sentences.py [-n 80] [-seed N] [-tests | -docs] [PATH...]

Generated code and pages are left out, tests too unless -tests is given. The seed is printed: the same tree and seed draw the same sentences.
"""
import argparse
import random
import re
import subprocess
import sys


def groups(path):
    """Yields (line number, text) of each comment: blocks of // lines, and each trailing comment by itself."""
    lines = open(path, encoding="utf-8").read().split("\n")
    start, block = 0, []
    for number, line in enumerate(lines + [""], 1):
        own = re.match(r"\s*//( .*|)$", line)
        if own:
            start = start or number
            block.append(own.group(1).strip())
            continue
        if block:
            yield start, block
            start, block = 0, []
        trailing = re.search(r"\S.*?\s// (.+)$", line)
        if trailing and "://" not in trailing.group(0)[:trailing.start(1) - trailing.start(0)]:
            yield number, [trailing.group(1)]


def paragraphs(path):
    """Yields (line number, text) of each paragraph and item of a page, without code, tables and headings."""
    number, fenced = 1, False
    for block in re.split(r"(\n\s*\n|\n(?=\s*(?:- |\d+\. |```)))", open(path, encoding="utf-8").read()):
        lines = block.strip("\n").split("\n")
        shown = fenced
        fenced ^= sum(l.lstrip().startswith("```") for l in lines) % 2 == 1
        text = re.sub(r"^\s*(- |\d+\. )", "", block.strip())
        code = re.match(r"\n* {4}\S", block) and text == block.strip()
        if not (shown or fenced or code) and text and not re.match(r"[#|!<`]{1,3}(\s|-|\[|\|)", text):
            yield number + len(block) - len(block.lstrip("\n")), [" ".join(text.split())]
        number += block.count("\n")


def sentences(path):
    for number, block in (paragraphs if path.endswith(".md") else groups)(path):
        text = " ".join(l for l in block if not re.match(r"(go:|nolint|Code generated)", l))
        for sentence in re.split(r"(?<=[.:;])\s+(?=[A-Z\[`])", text):
            if len(sentence.split()) >= 4:
                yield f"{path}:{number}: {sentence.strip()}"


def main():
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("-n", type=int, default=80)
    options.add_argument("-seed", type=int, default=random.randrange(1 << 30))
    options.add_argument("-tests", action="store_true")
    options.add_argument("-docs", action="store_true")
    options.add_argument("paths", nargs="*")
    o = options.parse_args()
    pages = ["docs/*.md", ":!docs/adr", ":!docs/configuration.md", ":!docs/metrics.md"]
    paths = o.paths or (pages if o.docs else ["."])
    files = subprocess.run(["git", "ls-files", "--", *paths], check=True, capture_output=True, text=True).stdout.split()
    if o.docs:
        files = [f for f in files if f.endswith(".md")]
    else:
        files = [f for f in files if f.endswith(".go") and not f.endswith(".pb.go") and (o.tests or not f.endswith("_test.go"))]
    every = [s for f in files for s in sentences(f)]
    print(f"{len(every)} sentences in {len(files)} files; seed {o.seed}", file=sys.stderr)
    for s in random.Random(o.seed).sample(every, min(o.n, len(every))):
        print(s)


main()
