"""What vLLM's request models make of values that are not of a member's own type: prints the table that
extproc/openai/testdata/coerced.json has. With that file as argument it compares instead, and prints a row.

usage: judge_coercion.py [coerced.json]
"""

import json
import logging
import sys
import warnings

logging.disable(logging.CRITICAL)
warnings.simplefilter("ignore")

import pydantic
import vllm
from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest as Messages
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest as Chat
from vllm.entrypoints.openai.completion.protocol import CompletionRequest as Completions
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest as Responses
from vllm.entrypoints.scale_out.token_in_token_out.protocol import GenerateRequest as Generate

VALUES = [
    # fmt: off
    "512", "512.0", "512.5", "5e2", "1E+2", "1e0", "0e0", "1.00", "1e400", "-1", "0", "1", "2", "1.0", "0.0", "2.0",
    "-0", "-0.0", "true", "false", "[1]", "{}", "[]", '"512"', '"512.0"', '"512.00"', '"512."', '"512.5"',
    '"5e2"', '"1e0"', '" 512 "', '"\\t512\\n"', '"\\u00a0512"', '"\\u2003512"', '"\\u0035"', '"+512"', '"-1"', '"-1.0"',
    '"0"', '"-0"', '"+0"', '"0.0"', '"0.000"', '"1"', '"1.0"', '"01"', '"00512"', '"5_12"', '"1_000.0"', '"0_5"',
    '"+5_1"', '"_512"', '"512_"', '"5__12"', '"+_5"', '"512.0_0"', '"1.0_"', '"0x10"', '"٣"', '"１"', '""', '" "',
    '"5 12"', '"- 1"', '"+-1"', '"--1"', '"."', '".0"', '"0."', '"1.0.0"', '"true"', '"True"', '"TRUE"', '"tRuE"',
    '"false"', '"False"', '"f"', '"t"', '"T"', '"y"', '"yes"', '"YES"', '"n"', '"N"', '"no"', '"on"', '"ON"', '"off"',
    '"OFF"', '" true "', '"true\\n"', '"on "', '"tru"', '"null"', '"None"', '"2"', '"\\u006fn"',
    # fmt: on
]
BASES = {
    Chat: {"model": "m", "messages": [{"role": "user", "content": "x"}]},
    Completions: {"model": "m", "prompt": "x"},
    Responses: {"model": "m", "input": "x"},
    Messages: {"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": "x"}]},
    Generate: {"token_ids": [1], "sampling_params": {}},
}
COUNTS = {Chat: "max_tokens max_completion_tokens min_tokens n", Completions: "max_tokens min_tokens n",
          Responses: "max_output_tokens", Messages: "max_tokens"}
FLAGS = {Chat: "stream echo use_beam_search ignore_eos return_token_ids", Completions: "stream echo use_beam_search",
         Responses: "stream store background", Messages: "stream", Generate: "stream"}


def read(model, member, text):
    value = json.loads(text)
    try:
        return getattr(model(**BASES[model], **{member: value}) if member not in BASES[model]
                       else model(**{**BASES[model], member: value}), member)
    except Exception:
        return "refused"


def sampling(text, member):
    try:
        return getattr(Generate(token_ids=[1], sampling_params={member: json.loads(text)}).sampling_params, member)
    except Exception:
        return "refused"


def table():
    """For each kind of member what its value becomes; members of one kind that differ are an error of this script,
    but for limits that a model has itself (a count below one)."""
    out = {"count": {}, "flag": {}}
    for kind, members in (("count", COUNTS), ("flag", FLAGS)):
        for text in VALUES:
            got = {}
            for model, names in members.items():
                for name in names.split():
                    got[f"{model.__name__}.{name}"] = read(model, name, text)
            if kind == "count":
                for name in ("max_tokens", "n"):
                    got[f"sampling_params.{name}"] = sampling(text, name)
            read_as = {json.dumps(v) for v in got.values()} - {'"refused"', "null"}
            assert len(read_as) <= 1, (kind, text, got)
            out[kind][text] = json.loads(read_as.pop()) if read_as else None
    return out


def main():
    found = table()
    if len(sys.argv) < 2:
        print("{")
        for kind, end in (("count", ","), ("flag", "")):
            rows = ",\n".join(f"    {json.dumps(k, ensure_ascii=False)}: {json.dumps(v)}" for k, v in found[kind].items())
            print(f'  "{kind}": {{\n{rows}\n  }}{end}')
        print("}")
        return
    with open(sys.argv[1], encoding="utf-8") as f:
        same = json.load(f) == found
    print(f"| all | pydantic {pydantic.VERSION}, counts and flags | vLLM {vllm.__version__} | "
          f"{len(VALUES) * 2 if same else 'OTHERWISE'} | |")
    sys.exit(not same)


main()
