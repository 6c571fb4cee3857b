#!/usr/bin/env python3
"""Has TensorRT-LLM's own request models read the parameters that Tandem sends. Its wheels are on no public index: the models come out of a
checkout of its repository, by name out of one file, without its imports. usage: judge_trtllm.py TESTDATA CHECKOUT"""
import ast
import enum
import pathlib
import sys
import typing

import goldens
import pydantic

WANTED = ("OpenAIBaseModel", "PromptTokensDetails", "UsageInfo", "DisaggregatedParams")


class DisaggScheduleStyle(enum.IntEnum):
    """tensorrt_llm/disaggregated_params.py: who is asked first."""

    CONTEXT_FIRST = 0
    GENERATION_FIRST = 1


def models(checkout: str) -> dict:
    path = pathlib.Path(checkout, "tensorrt_llm/serve/openai_protocol.py")
    found = {n.name: n for n in ast.parse(path.read_text()).body if isinstance(n, ast.ClassDef)}
    classes = [found[name] for name in WANTED]
    space = {**vars(typing), "BaseModel": pydantic.BaseModel, "ConfigDict": pydantic.ConfigDict, "Field": pydantic.Field,
             "DisaggScheduleStyle": DisaggScheduleStyle, "__name__": __name__}
    exec(compile(ast.Module(classes, []), str(path), "exec"), space)  # noqa: S102 - the engine's own code
    prompt = next(n for n in found["CompletionRequest"].body if isinstance(n, ast.AnnAssign) and n.target.id == "prompt")
    space["prompt"] = pydantic.TypeAdapter(eval(ast.unparse(prompt.annotation), space))  # noqa: S307 - the engine's own code
    assert space["OpenAIBaseModel"].model_config.get("extra") == "forbid", "unknown members would pass unseen"
    return space


def main():
    testdata, checkout = sys.argv[1:]
    engine = models(checkout)
    params = engine["DisaggregatedParams"]
    j = goldens.Judgement(testdata)

    def check(golden, leg, body):
        if "disaggregated_params" not in body:
            assert leg == "decode", "P would run the whole answer"
            return False
        p = params(**body["disaggregated_params"])
        assert p.request_type == ("context_only" if leg == "prefill" else "generation_only")
        assert leg == "prefill" or p.ctx_request_id is not None, "D would find no KV"
        if golden["path"] == "/v1/completions":
            prompt = engine["prompt"].validate_python(body["prompt"])
            ids = leg == "decode" and '"prompt_token_ids"' in golden.get("prefill answer", "")
            assert isinstance(prompt, list) == ids, "the server sends P's ids where P answers them, and only to D"
        assert leg == "decode" or p.disagg_request_id >= 1 << 42, "below are the engine's own ids"
        return None

    names = {"prefill": ["disaggregated_params", "request_type", "disagg_request_id"], "decode": ["disaggregated_params", "request_type", "ctx_request_id"]}
    for dialect in ("trtllm", "trtllm-generation-first"):
        j.dialect(dialect, "repository", "`DisaggregatedParams`", check, names)
    j.end()


if __name__ == "__main__":
    main()
