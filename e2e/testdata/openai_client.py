"""The official openai client against Tandem: chat, streaming, tools, completions, responses, models, errors."""
import sys

import openai

client = openai.OpenAI(base_url=sys.argv[1], api_key="none", max_retries=0, timeout=30)

assert [m.id for m in client.models.list()] == ["tiny"]

chat = client.chat.completions.create(model="tiny", max_tokens=8, messages=[{"role": "user", "content": "hello"}])
assert chat.choices[0].message.content and chat.usage.completion_tokens > 0, chat

stream = client.chat.completions.create(
    model="tiny", max_tokens=8, stream=True, stream_options={"include_usage": True},
    messages=[{"role": "user", "content": "hello"}])
chunks = list(stream)
text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
assert text == chat.choices[0].message.content, (text, chat)
assert chunks[-1].usage.completion_tokens == chat.usage.completion_tokens

tool = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}}
called = client.chat.completions.create(
    model="tiny", max_tokens=64, messages=[{"role": "user", "content": "weather in Oslo?"}], tools=[tool], tool_choice="required")
assert called.choices[0].message.tool_calls[0].function.name == "weather", called
streamed = client.chat.completions.create(
    model="tiny", max_tokens=64, messages=[{"role": "user", "content": "weather in Oslo?"}], tools=[tool], tool_choice="required", stream=True)
names = [t.function.name for c in streamed if c.choices for t in (c.choices[0].delta.tool_calls or []) if t.function.name]
assert names == ["weather"], names

completion = client.completions.create(model="tiny", prompt="once upon", max_tokens=8)
assert completion.choices[0].text

response = client.responses.create(model="tiny", input="hello", max_output_tokens=8)
assert response.output_text
events = [e.type for e in client.responses.create(model="tiny", input="hello", max_output_tokens=8, stream=True)]
assert events[0] == "response.created" and events[-1] in ("response.completed", "response.incomplete"), events

try:
    client.chat.completions.create(model="tiny", messages=17, max_tokens=8)
except openai.BadRequestError as e:
    assert e.status_code == 400
else:
    raise AssertionError("a bad request was answered")

print("all good")
