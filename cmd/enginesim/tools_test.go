package main

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestTools(t *testing.T) {
	const tools = `[{"type":"function","function":{"name":"f","parameters":{"type":"object","properties":{"a":{"type":"integer"},"b":{"type":"string"},"c":{"enum":["x"]},"d":{"type":"boolean"},"e":{"type":"array"},"g":{"type":"object","properties":{"h":{"type":"null"}}}}}}},{"type":"function","function":{"name":"second"}}]`
	e := startEngine(t)
	for choice, name := range map[string]string{`"required"`: "f", `{"type":"function","function":{"name":"second"}}`: "second"} {
		r := e.post(t, chatPath, "x", chat("hi", `"tools":`+tools, `"tool_choice":`+choice))
		require.Equal(t, "tool_calls", r.str("choices", "0", "finish_reason"))
		require.Equal(t, name, r.str("choices", "0", "message", "tool_calls", "0", "function", "name"))
		require.True(t, json.Valid([]byte(r.str("choices", "0", "message", "tool_calls", "0", "function", "arguments"))))
	}
	for _, choice := range []string{`"auto"`, `"none"`} {
		require.NotEmpty(t, e.post(t, chatPath, "x", chat("hi", `"tools":`+tools, `"tool_choice":`+choice)).content())
	}
	cut := e.post(t, chatPath, "x", chat("hi", `"tools":`+tools, `"tool_choice":"required"`, `"max_tokens":1`))
	require.Equal(t, `{"a"`, cut.content())
	require.Equal(t, "length", cut.str("choices", "0", "finish_reason"))

	plain := e.post(t, chatPath, "x", chat("hi", `"max_tokens":20`, `"tools":`+tools)).content()
	spaced := strings.ReplaceAll(tools, ",", " , ")
	require.Equal(t, plain, e.post(t, chatPath, "x", chat("hi", `"max_tokens":20`, `"tools":`+spaced)).content(), "space is no token")
	reordered := strings.Replace(tools, `"type":"function","function":{"name":"second"}`, `"function":{"name":"second"},"type":"function"`, 1)
	require.NotEqual(t, plain, e.post(t, chatPath, "x", chat("hi", `"max_tokens":20`, `"tools":`+reordered)).content(), "order is")
}
