package openai

import (
	"bytes"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// feed cuts a stream into pieces of n bytes and returns the data of its events.
func feed(t testing.TB, stream string, n int) (data []string) {
	var e Events
	each := func(event []byte) { data = append(data, string(EventData(nil, event))) }
	for rest := []byte(stream); len(rest) > 0; {
		k := min(n, len(rest))
		require.NoError(t, e.Feed(rest[:k], each))
		rest = rest[k:]
	}
	e.End(each)
	return data
}

func TestIsEventStream(t *testing.T) {
	for kind, is := range map[string]bool{
		"text/event-stream": true, "text/event-stream; charset=utf-8": true, "Text/Event-Stream ;charset=utf-8": true,
		"": false, "text/event-streams": false, "application/json": false, "application/json; a=text/event-stream": false,
	} {
		require.Equal(t, is, IsEventStream(kind), kind)
	}
}

func TestIsComment(t *testing.T) {
	for piece, is := range map[string]bool{
		"": true, "\n": true, ": ping\n\n": true, ":\r\n\r\n": true, ": a\n: b\r\r": true, ": pi": true,
		"data: a\n\n": false, ": ping\n\ndata: a": false, ": ping\rdata: a": false, "event: x\n": false, "ng\n\n": false,
	} {
		require.Equal(t, is, IsComment([]byte(piece)), "%q", piece)
	}
}

// However a stream was cut on its way, its events are the same.
func TestEvents(t *testing.T) {
	for name, tt := range map[string]struct {
		stream string
		want   []string
	}{
		"LF":                     {"data: a\n\ndata: b\n\n", []string{"a", "b"}},
		"CR LF":                  {"data: a\r\n\r\ndata: b\r\n\r\n", []string{"a", "b"}},
		"CR":                     {"data: a\r\rdata: b\r\r", []string{"a", "b"}},
		"mixed":                  {"data: a\r\n\ndata: b\n\r\ndata: c\n\n", []string{"a", "b", "c"}},
		"no space":               {"data:a\n\ndata:  b\n\n", []string{"a", " b"}},
		"several lines":          {"data: a\ndata: b\n\n", []string{"a\nb"}},
		"several lines, CR LF":   {"data: a\r\ndata:\r\ndata: b\r\n\r\n", []string{"a\n\nb"}},
		"fields and comments":    {": ping\n\nevent: x\nid: 1\ndata: a\n\n", []string{"", "a"}},
		"more empty lines":       {"\n\n\r\ndata: a\n\n\n\n\ndata: b\n\n", []string{"a", "b"}},
		"no end":                 {"data: a\n\ndata: b", []string{"a", "b"}},
		"the last line's end":    {"data: a\n\ndata: b\n", []string{"a", "b"}},
		"nothing":                {"", nil},
		"line ends and no event": {"\r\n\r\n\n", nil},
		"text that looks alike":  {"data: {\"t\":\"\\n\\ndata: x\"}\n\n", []string{`{"t":"\n\ndata: x"}`}},
	} {
		t.Run(name, func(t *testing.T) {
			for n := 1; n <= len(tt.stream)+1; n++ {
				require.Equal(t, tt.want, feed(t, tt.stream, n), "in pieces of %d bytes", n)
			}
		})
	}
}

func TestEventTooLong(t *testing.T) {
	var e Events
	chunk := bytes.Repeat([]byte("x"), 1<<20)
	var err error
	for i := 0; err == nil; i++ {
		require.Less(t, i, 10)
		err = e.Feed(chunk, func([]byte) { t.Fatal("an event") })
	}
	require.ErrorIs(t, err, ErrEventTooLong)
}

// eventsOf is the dumb twin of Events: all of a stream at once, after normalising line ends.
func eventsOf(stream string) (data []string) {
	stream = strings.ReplaceAll(strings.ReplaceAll(stream, "\r\n", "\n"), "\r", "\n")
	var event []string
	for line := range strings.SplitSeq(stream+"\n\n", "\n") {
		if line != "" {
			event = append(event, line)
			continue
		}
		if event == nil {
			continue
		}
		var lines []string
		for _, l := range event {
			if d, ok := strings.CutPrefix(l, "data:"); ok {
				lines = append(lines, strings.TrimPrefix(d, " "))
			}
		}
		data, event = append(data, strings.Join(lines, "\n")), nil
	}
	return data
}

func FuzzEvents(f *testing.F) {
	f.Add("data: a\r\n\r\n: c\rdata:b\n\n", uint8(1))
	f.Add("event: x\ndata: 1\r\rdata", uint8(3))
	files, _ := filepath.Glob("testdata/*.sse")
	for _, file := range files {
		text, err := os.ReadFile(file)
		require.NoError(f, err)
		f.Add(string(text), uint8(7))
	}
	f.Fuzz(func(t *testing.T, stream string, n uint8) {
		require.Equal(t, eventsOf(stream), feed(t, stream, int(n)+1))
	})
}

// A stream may last for minutes after a large event.
func TestEventsKeepNoLargeBuffer(t *testing.T) {
	var e Events
	n := 0
	each := func(event []byte) { n += len(event) }
	large := "data: " + strings.Repeat("x", 4<<20)
	for piece := range slices.Chunk([]byte(large+"\n\ndata: be"), 64<<10) {
		require.NoError(t, e.Feed(piece, each))
	}
	require.LessOrEqual(t, cap(e.held), keepHeld)
	require.NoError(t, e.Feed([]byte("hind\n\n"), each))
	require.Equal(t, len(large)+len("data: behind"), n)
}
