package openai

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestClassify(t *testing.T) {
	for _, c := range []struct {
		method, path string
		want         API
	}{
		{"POST", "/v1/chat/completions", Chat},
		{"POST", "/v1/chat/completions?a=/b", Chat},
		{"POST", "/v1/completions", Completions},
		{"POST", "/v1/responses", Responses},
		{"POST", "/v1/messages", Messages},
		{"POST", "/inference/v1/generate", Generate},
		{"GET", "/v1/models", Models},
		{"GET", "/v1/models?x", Models},
		{"POST", "/v1/chat/%63ompletions", Chat},
		{"POST", "/v1%2Fcompletions", Completions},
		{"POST", "/v1/completions%3Fx", PassThrough},
		{"POST", "/v1/completions%", PassThrough},
		{"GET", "/v1/chat/completions", PassThrough},
		{"post", "/v1/chat/completions", PassThrough},
		{"POST", "/v1/chat/completions/", PassThrough},
		{"POST", "/v1/chat/completions/batch", PassThrough},
		{"POST", "/v1/Completions", PassThrough},
		{"POST", "//v1/completions", PassThrough},
		{"POST", "/v1/responses/resp_1/cancel", PassThrough},
		{"POST", "/v1/messages/count_tokens", PassThrough},
		{"GET", "/v1/models/m", Models},
		{"POST", "/v1/models", PassThrough},
		{"GET", "/health", PassThrough},
		{"POST", "", PassThrough},
	} {
		require.Equal(t, c.want, Classify(c.method, c.path), c.method+" "+c.path)
	}
	require.Equal(t, "generate", Generate.String())
	require.Equal(t, "models", Models.String())
}

func TestRequest(t *testing.T) {
	r := scanned(t, Chat, `{ "model" : "a\u00e9" , "stream":true,"n":3, "max_tokens": null,"seed":1,"top_logprobs":5.0,`+
		`"max_completion_tokens":9223372036854775808,"min_tokens":-9223372036854775808,"best_of":5e0,"echo":"x",`+
		`"system":"q\"\ud800","messages": [ 1 ] ,"sampling_params":{"n": 7 }}`)
	require.Equal(t, Chat, r.API())
	require.Equal(t, "aé", r.Model())
	require.True(t, r.True(FieldStream))
	require.False(t, r.True(FieldEcho))
	require.True(t, r.Has(FieldMaxTokens))
	require.False(t, r.Has(FieldStop))
	require.Equal(t, "null", string(r.Raw(FieldMaxTokens)))
	require.Nil(t, r.Raw(FieldStop))
	require.Equal(t, "[ 1 ]", string(r.Raw(FieldMessages)))
	require.Equal(t, "7", string(r.Sampling(FieldN)))
	require.Nil(t, r.Sampling(FieldStop))
	require.Nil(t, r.Sampling(FieldStream), "top-level members are no limits")

	n, ok := r.Int(FieldN)
	require.True(t, ok)
	require.Equal(t, int64(3), n)
	n, ok = r.Int(FieldMinTokens)
	require.True(t, ok)
	require.Equal(t, int64(-1<<63), n)
	for _, f := range []Field{FieldMaxTokens, FieldEcho, FieldStop, FieldMessages} {
		_, ok = r.Int(f)
		require.False(t, ok, f)
	}
	s, ok := r.String(FieldSystem)
	require.True(t, ok)
	require.Equal(t, "q\"\uFFFD", s)
	s, ok = r.String(FieldEcho)
	require.True(t, ok)
	require.Equal(t, "x", s)
	_, ok = r.String(FieldN)
	require.False(t, ok)
	_, ok = r.String(FieldStop)
	require.False(t, ok)
}

// TestRequestAgain scans one body after the other into one Request: nothing of an earlier one may remain.
func TestRequestAgain(t *testing.T) {
	var r Request
	require.NoError(t, r.Scan(Chat, []byte(`{"model":"a","kv_transfer_params":{},"sampling_params":{"n":2}}`), Limits{}))
	require.True(t, r.HasControl())
	require.Error(t, r.Scan(Chat, []byte(`{"stop":1,"model":`), Limits{}))
	require.Empty(t, r.Model())
	require.False(t, r.HasControl())
	require.False(t, r.Has(FieldStop))
	require.NoError(t, r.Scan(Responses, []byte(`{"n":1}`), Limits{}))
	require.Equal(t, Responses, r.API())
	require.Nil(t, r.Sampling(FieldN))
	require.Empty(t, r.Model())
	require.NoError(t, r.Scan(Chat, []byte(`{"model":null}`), Limits{}))
	require.Empty(t, r.Model())
	require.NoError(t, r.Scan(Chat, []byte(`{"model":"b"}`), Limits{}))
	r.Reset()
	require.Empty(t, r.Model())
	require.Nil(t, r.Body())
	require.Nil(t, r.Raw(FieldModel))
}

func TestFieldNames(t *testing.T) {
	names := map[Field]string{}
	for name := range strings.FieldsSeq(`model stream stream_options max_tokens max_completion_tokens max_output_tokens min_tokens
		min_completion_tokens stop stop_token_ids stop_sequences include_stop_str_in_output n best_of logprobs top_logprobs
		prompt_logprobs echo use_beam_search output_mode messages prompt prompt_embeds input token_ids sampling_params store
		background previous_response_id request_id tools system instructions reasoning_effort chat_template chat_template_kwargs
		documents cache_salt return_token_ids kv_transfer_params text input_ids
		bootstrap_host bootstrap_port bootstrap_room return_logprob disaggregated_params vllm_xargs extra_args priority seed`) {
		f := fieldOf([]byte(name))
		require.NotEqual(t, fieldUnknown, f, name)
		require.Empty(t, names[f], name)
		names[f] = name
	}
	require.Len(t, names, int(numFields)-2, "all but those without a name of their own")
}

func TestClean(t *testing.T) {
	for _, c := range []struct{ body, want string }{
		{`{"kv_transfer_params":{"do_remote_prefill":true}}`, `{}`},
		{`{"a":1,"kv_transfer_params":null,"b":2}`, `{"a":1,"b":2}`},
		{`{"kv\u005ftransfer_params":1,"a":1}`, `{"a":1}`},
		{`{"ec_transfer_params":1,"disaggregated_params":1,"disagg_prefill_resp":1,"a":1,"bootstrap_host":1,"bootstrap_port":1,` +
			`"bootstrap_room":1,"bootstrap_new":1,"routed_dp_rank":1,"disagg_prefill_dp_rank":1,"data_parallel_rank":1,"nvext":{},` +
			`"do_local_prefill":true}`, `{"a":1}`},
		{`{"sampling_params":{"n":1,"extra_args":{"x":1,"kv_transfer_params":{"do_remote_prefill":true}}},"a":1}`,
			`{"sampling_params":{"n":1,"extra_args":{"x":1}},"a":1}`},
		{`{"nvext":1,"vllm_xargs":{"kv_transfer_params":"x","y":2},"data_parallel_rank":0}`, `{"vllm_xargs":{"y":2}}`},
		{`{"messages":[{"kv_transfer_params":1}],"a":{"kv_transfer_params":1},"nvext":1}`, `{"messages":[{"kv_transfer_params":1}],"a":{"kv_transfer_params":1}}`},
	} {
		r := scanned(t, Chat, c.body)
		require.True(t, r.HasControl(), c.body)
		clean := r.Clean([]byte("x"))
		require.Equal(t, "x"+c.want, string(clean))
		require.False(t, scanned(t, Chat, string(clean[1:])).HasControl())
	}
	r := scanned(t, Chat, `{"model":"m","max_tokens":1,"KV_transfer_params":1,"x":{"nvext":1}}`)
	require.False(t, r.HasControl())
	require.Equal(t, string(r.Body()), string(r.Clean(nil)))
}

// FuzzClean: the result is valid, without control members, and the rest is unchanged.
func FuzzClean(f *testing.F) {
	for _, s := range []string{
		`{"nvext":1,"a":2,"kv_transfer_params":{"x":[1]} , "b":3}`, ` {"kv_transfer_params" : 1 , "nvext" : 2 } `,
		`{"sampling_params":{"nvext":1,"extra_args":{"kv_transfer_params":1}},"vllm_xargs":{"a":1,"ec_transfer_params":2},"nvext":1}`,
	} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, body []byte) {
		var r Request
		if r.Scan(Chat, body, Limits{}) != nil {
			return
		}
		clean := r.Clean(nil)
		require.True(t, json.Valid(clean), "%q", clean)
		var again Request
		require.NoError(t, again.Scan(Chat, clean, Limits{}))
		require.False(t, again.HasControl())
		require.Equal(t, r.HasControl(), len(clean) != len(body))
		left := again.members[scopeTop]
		for i := range r.members[scopeTop] {
			m := &r.members[scopeTop][i]
			if m.field.control() {
				continue
			}
			require.Equal(t, string(r.key(m)), string(again.key(&left[0])))
			if m.field != FieldSamplingParams && m.field != fieldVLLMXArgs {
				require.Equal(t, string(r.text(m)), string(again.text(&left[0])))
			}
			left = left[1:]
		}
		require.Empty(t, left)
	})
}

func TestUnsplittable(t *testing.T) {
	for _, c := range []struct {
		api    API
		body   string
		reason string
	}{
		{Chat, `{"messages":[],"n":1,"best_of":1,"echo":false,"prompt_logprobs":null,"use_beam_search":false}`, ""},
		{Chat, `{"n":null,"best_of":null,"use_beam_search":null,"echo":null}`, ""},
		{Chat, `{"n":2}`, "several_choices"},
		{Chat, `{"n":1.5}`, "several_choices"},
		{Chat, `{"n":"2"}`, "several_choices"},
		{Completions, `{"best_of":4}`, "several_choices"},
		{Chat, `{"use_beam_search":true}`, "beam_search"},
		{Completions, `{"echo":true}`, "echo"},
		{Completions, `{"prompt_logprobs":0}`, "prompt_logprobs"},
		{Completions, `{"prompt":"text"}`, ""},
		{Completions, `{"prompt":[1,2,3]}`, ""},
		{Completions, `{"prompt":[ -1]}`, ""},
		{Completions, `{"prompt":null}`, ""},
		{Completions, `{"prompt":["a","b"]}`, "prompt_list"},
		{Completions, `{"prompt":[ "a","b"]}`, "prompt_list"},
		{Completions, `{"prompt":[[1],[2]]}`, "prompt_list"},
		{Completions, `{"prompt":[]}`, "prompt_list"},
		{Chat, `{"prompt":["a"]}`, ""},
		{Completions, `{"prompt_embeds":"AAAA"}`, "prompt_embeds"},
		{Generate, `{"token_ids":[1],"sampling_params":{"n":1}}`, ""},
		{Generate, `{"sampling_params":{"n":2}}`, "several_choices"},
		{Generate, `{"sampling_params":{"prompt_logprobs":1}}`, "prompt_logprobs"},
		{Generate, `{"n":2}`, ""},
		{Responses, `{"input":"a"}`, ""},
		{Responses, `{"input":"a","store":false,"background":false,"previous_response_id":null,"tools":null}`, ""},
		{Responses, `{"store":true}`, "stored_response"},
		{Responses, `{"background":true}`, "stored_response"},
		{Responses, `{"previous_response_id":"resp_1"}`, "stored_response"},
		{Responses, `{"tools":[]}`, ""},
		{Responses, `{"tools":[ {"name":"f","parameters":{"type":"mcp"},"type" : "function"} , {"type":"function"} ]}`, ""},
		{Responses, `{"tools":[{"type":"function"},{"type":"web_search"}]}`, "engine_tools"},
		{Responses, `{"tools":[{"type":"function","t\u0079pe":"mcp"}]}`, "engine_tools"},
		{Responses, `{"tools":[{"type":"code_interpreter","container":{"type":"auto"}}]}`, "engine_tools"},
		{Responses, `{"tools":[{}]}`, "engine_tools"},
		{Responses, `{"tools":[1]}`, "engine_tools"},
		{Responses, `{"tools":"all"}`, "engine_tools"},
		{Chat, `{"tools":[{"type":"web_search"}],"store":true}`, ""},
		{Messages, `{"messages":[],"max_tokens":5,"tools":[{"name":"f","input_schema":{}}]}`, ""},
	} {
		require.Equal(t, c.reason, scanned(t, c.api, c.body).Unsplittable(), c.body)
	}
}

func TestIterate(t *testing.T) {
	var got []string
	for v := range elements([]byte(`[ 1 , [2,3] ,"a]" , {"b":[]} ]`)) {
		got = append(got, string(v))
	}
	require.Equal(t, []string{"1", "[2,3]", `"a]"`, `{"b":[]}`}, got)
	got = nil
	for k, v := range pairs([]byte(`{ "a" : 1 ,"\u0062":[2,3] , "c":{"d":"}"} }`)) {
		got = append(got, string(k)+"="+string(v))
	}
	require.Equal(t, []string{"a=1", "b=[2,3]", `c={"d":"}"}`}, got)
	for _, v := range []string{``, `1`, `"[1]"`, `[]`, `{}`, `[ ]`, `{ }`} {
		for range elements([]byte(v)) {
			t.Fatal(v)
		}
		for range pairs([]byte(v)) {
			t.Fatal(v)
		}
	}
	for range elements([]byte(`[1,2]`)) {
		break
	}
	for range pairs([]byte(`{"a":1,"b":2}`)) {
		break
	}
}
