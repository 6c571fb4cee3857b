package picker

import (
	"bufio"
	"bytes"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"tandem/kvstate"
)

var update = flag.Bool("update", false, "rewrite the transcripts in testdata")

// TestTranscripts runs testdata/*.txt, which read as fleets in, choices out:
//
//	endpoint NAME prefill|decode|both [load=REQUESTS/TOKENS] [hit=BLOCKS] [group=NAME] [out]
//	pick [tokens=N] [blocks=N] [unsplit] [excluded=NAME,NAME]
//	decode NAME ...            (PickDecode for the prompt that NAME has computed; "-" for none)
//	> what came out; several where chance decides between equals
//
// A blank line ends the fleet. With -update the lines that begin with > are written anew.
func TestTranscripts(t *testing.T) {
	files, err := filepath.Glob("testdata/*.txt")
	require.NoError(t, err)
	require.NotEmpty(t, files)
	for _, file := range files {
		t.Run(filepath.Base(file), func(t *testing.T) {
			text, err := os.ReadFile(file)
			require.NoError(t, err)
			got := play(t, text)
			if *update {
				require.NoError(t, os.WriteFile(file, got, 0o600))
				return
			}
			require.Equal(t, string(text), string(got))
		})
	}
}

// play gives a transcript back with the answers that the picker gives now.
func play(t *testing.T, text []byte) []byte {
	var out bytes.Buffer
	var v kvstate.View
	for lines := bufio.NewScanner(bytes.NewReader(text)); lines.Scan(); {
		line := lines.Text()
		if strings.HasPrefix(line, ">") {
			continue
		}
		fmt.Fprintln(&out, line)
		words := strings.Fields(line)
		switch {
		case len(words) == 0:
			v.Endpoints = nil
		case words[0] == "endpoint":
			v.Endpoints = append(v.Endpoints, candidate(t, words[1:]))
		case words[0] == "pick":
			r := request(t, words[1:])
			answer(&out, func(chance uint64) string {
				r.Rand = chance
				c, err := Pick(r, &v)
				return choice(&v, c, err)
			})
		case words[0] == "decode":
			r, prefill := request(t, words[2:]), -1
			for i, c := range v.Endpoints {
				if c.Endpoint.Name == words[1] {
					prefill = i
				}
			}
			answer(&out, func(chance uint64) string {
				r.Rand = chance
				d, err := PickDecode(r, &v, prefill)
				return choice(&v, Choice{prefill, d}, err)
			})
		case words[0] != "#":
			t.Fatalf("cannot read %q", line)
		}
	}
	return out.Bytes()
}

// answer writes what comes out for many values of chance.
func answer(out *bytes.Buffer, pick func(chance uint64) string) {
	var all []string
	for i := range uint64(256) {
		all = append(all, pick((i+1)*0x9e3779b97f4a7c15))
	}
	slices.Sort(all)
	for _, s := range slices.Compact(all) {
		fmt.Fprintln(out, ">", s)
	}
}

func choice(v *kvstate.View, c Choice, err error) string {
	if err != nil {
		return err.Error()
	}
	if c.Prefill < 0 {
		return v.Endpoints[c.Decode].Endpoint.Name + " alone"
	}
	return v.Endpoints[c.Prefill].Endpoint.Name + " -> " + v.Endpoints[c.Decode].Endpoint.Name
}

func candidate(t *testing.T, words []string) kvstate.Candidate {
	role, err := kvstate.ParseRole(words[1])
	require.NoError(t, err)
	e := &kvstate.Endpoint{EndpointSpec: kvstate.EndpointSpec{Name: words[0], Addr: words[0], Role: role}}
	c := kvstate.Candidate{Endpoint: e, Usable: true}
	for _, w := range words[2:] {
		key, value, _ := strings.Cut(w, "=")
		switch key {
		case "load":
			requests, tokens, _ := strings.Cut(value, "/")
			c.Requests, c.PromptTokens = number(t, requests), number(t, tokens)
		case "hit":
			c.Hit = int(number(t, value))
		case "group":
			e.Group = value
		case "out":
			c.Usable = false
		default:
			t.Fatalf("cannot read %q", w)
		}
	}
	return c
}

func request(t *testing.T, words []string) *Request {
	r := &Request{Split: true}
	for _, w := range words {
		key, value, _ := strings.Cut(w, "=")
		switch key {
		case "tokens":
			r.PromptTokens = number(t, value)
		case "blocks":
			r.Blocks = int(number(t, value))
		case "unsplit":
			r.Split = false
		case "excluded":
			r.Excluded = strings.Split(value, ",")
		default:
			t.Fatalf("cannot read %q", w)
		}
	}
	return r
}

func number(t *testing.T, s string) int64 {
	n, err := strconv.ParseInt(s, 10, 64)
	require.NoError(t, err)
	return n
}
