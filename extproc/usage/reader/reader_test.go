package reader

import (
	"bytes"
	"encoding/json"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"tandem/extproc/ended"
	"tandem/extproc/names"
	"tandem/extproc/usage/reader/readertest"
)

// read reads an answer in pieces of a size.
func read(answer []byte, stream bool, size int) ended.Usage {
	r := New(stream)
	for len(answer) > 0 {
		n := min(size, len(answer))
		r.Feed(answer[:n])
		answer = answer[n:]
	}
	return r.Said()
}

// Every API's form, however it is cut into pieces: the same cases as the script's beside Envoy.
func TestAnswers(t *testing.T) {
	for name, c := range readertest.Answers() {
		t.Run(name, func(t *testing.T) {
			says := map[string]float64{}
			if c.Says != "" {
				require.NoError(t, json.Unmarshal([]byte(c.Says), &says))
			}
			var want ended.Usage
			for i, key := range names.UsageKeys {
				if n, ok := says[key]; ok {
					*want.Counts()[i] = ended.CountOf(n)
				}
			}
			require.Equal(t, int64(says[names.UsageTotal]), want.Total())
			for _, size := range []int{1, 2, 3, 7, 50, 1 << 30} {
				require.Equal(t, want, read([]byte(c.Text), !strings.HasPrefix(name, "plain"), size), size)
			}
		})
	}
}

// A piece that ends a line leaves the reader where a caller may leave out the next lines.
func TestWithin(t *testing.T) {
	for text, within := range map[string]bool{
		"": false, "data: {}\n\n": false, "data: {}": true, "d": true, "\n": false, ": note": true, "data: [DONE]\r\n": false,
	} {
		r := New(true)
		r.Feed([]byte(text))
		require.Equal(t, within, r.Within(), "%q", text)
	}
}

// twin reads an object of JSON, the simple way: member by member, each with the names of those around it.
func twin(d *json.Decoder, path string, to *ended.Usage) {
	for d.More() {
		name, _ := d.Token()
		below := path + "/" + name.(string)
		value(d, below, to)
	}
	_, _ = d.Token()
}

func value(d *json.Decoder, path string, to *ended.Usage) {
	v, _ := d.Token()
	switch v := v.(type) {
	case json.Delim:
		if v == '{' {
			twin(d, path, to)
			return
		}
		for d.More() {
			value(d, path+"/[]", to)
		}
		_, _ = d.Token()
	case json.Number:
		n, err := strconv.ParseFloat(v.String(), 64)
		if err != nil || len(v) > 64 {
			n = -1
		}
		for i, names := range twinNames {
			for _, name := range names {
				if path == name {
					*to.Counts()[i] = ended.CountOf(n)
				}
			}
		}
	}
}

var twinNames = [5][]string{
	{"/usage/prompt_tokens", "/usage/input_tokens", "/response/usage/prompt_tokens", "/response/usage/input_tokens",
		"/message/usage/input_tokens", "/meta_info/prompt_tokens"},
	{"/usage/completion_tokens", "/usage/output_tokens", "/response/usage/completion_tokens",
		"/response/usage/output_tokens", "/meta_info/completion_tokens"},
	{"/usage/prompt_tokens_details/cached_tokens", "/usage/input_tokens_details/cached_tokens",
		"/response/usage/prompt_tokens_details/cached_tokens", "/response/usage/input_tokens_details/cached_tokens",
		"/meta_info/cached_tokens"},
	{"/usage/cache_read_input_tokens", "/response/usage/cache_read_input_tokens", "/message/usage/cache_read_input_tokens"},
	{"/usage/cache_creation_input_tokens", "/response/usage/cache_creation_input_tokens",
		"/message/usage/cache_creation_input_tokens"},
}

// Of any bytes in any pieces the reader reads the same as at once, and of JSON what its twin does.
func FuzzReader(f *testing.F) {
	for name, c := range readertest.Answers() {
		if len(c.Text) < 1<<12 {
			f.Add([]byte(c.Text), !strings.HasPrefix(name, "plain"), 5)
		}
	}
	f.Add([]byte(`{"a":{"usage":[{}]},"usage":{"x":{"input_tokens":[1]},"input_tokens":2e3,"output_tokens":-0}}`), false, 3)
	f.Fuzz(func(t *testing.T, answer []byte, stream bool, size int) {
		got := read(answer, stream, len(answer)+1)
		require.Equal(t, got, read(answer, stream, 1+int(uint(size)%64)))
		var want ended.Usage
		objects := [][]byte{answer}
		if stream {
			objects = nil
			for line := range bytes.FieldsFuncSeq(answer, func(r rune) bool { return r == '\n' || r == '\r' }) {
				if text, is := bytes.CutPrefix(line, []byte(prefix)); is {
					objects = append(objects, text)
				}
			}
		}
		for _, text := range objects {
			text = bytes.TrimLeft(text, " \t\n\r")
			switch {
			case len(text) == 0 || text[0] != '{':
				continue
			case !json.Valid(text) || bytes.Contains(text, []byte(`\u`)) || bytes.Contains(text, []byte("/")):
				t.Skip("what is not JSON may say anything or nothing; the twin's paths know no escapes and slashes")
			}
			d := json.NewDecoder(bytes.NewReader(text))
			d.UseNumber()
			_, _ = d.Token()
			twin(d, "", &want)
		}
		require.Equal(t, want, got)
	})
}

// Most of what a worker reads is not usage: long texts and lists of numbers.
func BenchmarkRead(b *testing.B) {
	answers := readertest.Answers()
	for _, name := range []string{"plain embeddings", "an overlong line", "chat"} {
		text := []byte(answers[name].Text)
		b.Run(name, func(b *testing.B) {
			b.SetBytes(int64(len(text)))
			b.ReportAllocs()
			for b.Loop() {
				read(text, !strings.HasPrefix(name, "plain"), 16<<10)
			}
		})
	}
}
