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
	"time"

	"github.com/stretchr/testify/require"

	"tandem/kvstate"
	"tandem/kvstate/residency"
)

var update = flag.Bool("update", false, "rewrite the transcripts in testdata")

// TestTranscripts runs testdata/*.txt, with fleets as input and choices as output:
//
//	endpoint NAME prefill|decode|both [answers=REQUESTS/TOKENS] [kv=TOKENS of capacity] [queue=JOBS/DURATION] [local=DURATION] [share=X] [speed=X]
//	         [hit=BLOCKS] [group=NAME] [zone=NAME] [engine=NAME] [layout=NAME] [loras=NAME,NAME] [labels=NAME=VALUE,...] [out|full]
//	         [unloadable[=NAME,NAME] [trial]]
//	         [memory=FREE/TOKENS] [live=TOKENS] [returns=PER SECOND] [coming=TOKENS] [old=TOKENS/LENGTH/CHANCE of a conversation]...
//	fleet [load=X] [work=DURATION] [local=X]    (utilisation of prefill, mean prefill, utilisation by local prefills)
//	      [live=TOKENS]    (of conversations that are expected back)
//	uses BLOCKS=N ...    (that many blocks of the prompt were in N recent prompts)
//	policy [split=always|auto|never] [min=TOKENS] [tpot=DURATION] [answer=WEIGHT] [late]    (holds until the next)
//	pick [tokens=N] [blocks=N] [answer=N] [unsplit] [excluded=NAME,NAME] [twice=NAME,NAME]
//	     [failed=P,D] [trial] [must] [model=NAME] [labels=NAME=VALUE,...]
//	     [ttft=DURATION] [tpot=DURATION] [waited=DURATION] [miss=wait|shed]
//	explain ...                (pick, with all prices, in milliseconds)
//	decode NAME ...            (PickDecode for the prompt that NAME has computed; "-" for none)
//	> the choice; several if chance decides between equals
//
// A blank line ends the fleet. With -update the lines that begin with > are rewritten.
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

// play returns a transcript with the picker's current answers.
func play(t *testing.T, text []byte) []byte {
	var out bytes.Buffer
	var v kvstate.View
	k := always()
	for lines := bufio.NewScanner(bytes.NewReader(text)); lines.Scan(); {
		line := lines.Text()
		if strings.HasPrefix(line, ">") {
			continue
		}
		fmt.Fprintln(&out, line)
		words := strings.Fields(line)
		switch {
		case len(words) == 0:
			v = kvstate.View{}
		case words[0] == "endpoint":
			v.Endpoints = append(v.Endpoints, candidate(t, words[1:]))
			v.SameNode = sameNodePairs(&v)
		case words[0] == "fleet":
			v.Load = utilisation(t, words[1:])
		case words[0] == "uses":
			for _, word := range words[1:] {
				var u kvstate.UseStep
				_, err := fmt.Sscanf(word, "%d=%g", &u.Blocks, &u.Uses)
				require.NoError(t, err)
				v.Uses = append(v.Uses, u)
			}
		case words[0] == "policy":
			k.Policy = policy(t, words[1:])
		case words[0] == "pick" || words[0] == "explain":
			r := request(t, words[1:])
			if words[0] == "explain" {
				e, lines := k.Explain(r, &v), bytes.Buffer{}
				e.Print(&lines)
				for line := range strings.Lines(lines.String()) {
					fmt.Fprint(&out, "> ", line)
				}
			}
			answer(&out, func(chance uint64) string {
				r.Rand = chance
				c, err := k.Pick(r, &v)
				if r.Targets == (Targets{}) {
					c.FirstToken = 0 // for tests that need it
				}
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
				d, err := k.PickDecode(r, &v, prefill)
				return choice(&v, Choice{Prefill: prefill, Decode: d}, err)
			})
		case words[0] != "#":
			t.Fatalf("cannot read %q", line)
		}
	}
	return out.Bytes()
}

// answer writes the choices for many random values.
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
	times := ""
	if c.FirstToken > 0 {
		times = fmt.Sprintf(", first token in %.0f ms, then one each %.1f ms", c.FirstToken*1000, c.TokenTime*1000)
	}
	if c.Wait {
		times += ", may wait"
	}
	if c.NoMemory {
		times += ", waits for memory"
	}
	if c.Prefill < 0 {
		return v.Endpoints[c.Decode].Endpoint.Name + " alone" + times
	}
	return v.Endpoints[c.Prefill].Endpoint.Name + " -> " + v.Endpoints[c.Decode].Endpoint.Name + times
}

func candidate(t *testing.T, words []string) kvstate.Candidate {
	role, err := kvstate.ParseRole(words[1])
	require.NoError(t, err)
	e := &kvstate.Endpoint{EndpointSpec: kvstate.EndpointSpec{Name: words[0], Addr: words[0], Role: role}}
	c := kvstate.Candidate{Endpoint: e, Usable: true}
	for _, w := range words[2:] {
		key, value, _ := strings.Cut(w, "=")
		switch key {
		case "answers":
			requests, tokens, _ := strings.Cut(value, "/")
			c.Requests, c.PromptTokens = c.Requests+number(t, requests), number(t, tokens)
		case "queue":
			jobs, work, _ := strings.Cut(value, "/")
			c.Jobs, c.Queue = number(t, jobs), duration(t, work)
			c.Requests += c.Jobs
		case "kv":
			c.KVTokens = number(t, value)
		case "usage":
			c.Signals, c.Trust = &kvstate.Signals{KVUsage: float(t, value)}, 1
		case "local":
			c.Local = duration(t, value)
		case "word":
			c.Word = map[string]kvstate.Role{"prefill": kvstate.RolePrefill, "decode": kvstate.RoleDecode}[value]
		case "share":
			c.Share = float(t, value)
		case "speed":
			c.Speed = float(t, value)
		case "transfer":
			c.Transfer = float(t, value)
		case "step":
			c.Step = float(t, value)
		case "zone":
			e.Zone = value
		case "node":
			e.Node = value
		case "engine":
			e.Engine = value
		case "blocks":
			c.Report = &kvstate.Report{kvstate.FactBlockSize: value}
		case "awaits": // its engine's first report
			c.Awaits = true
		case "hit":
			c.Hit = int(number(t, value))
		case "loads": // of those blocks: from CPU memory, disk and a remote store
			_, err := fmt.Sscanf(value, "%d/%d/%d", &c.Loads[0], &c.Loads[1], &c.Loads[2])
			require.NoError(t, err)
		case "group":
			e.Group = value
		case "loras":
			e.LoRAs = value
		case "labels":
			e.Labels = value
		case "out":
			c.Usable = false
		case "full":
			c.Usable, c.Full = false, true
		case "unloadable": // by these decode endpoints, or at all
			c.Faults = &kvstate.LoadFaults{}
			if value == "" {
				c.Faults.Parts = role
			} else {
				c.Faults.Decodes = strings.Split(value, ",")
			}
		case "memory":
			c.Memory = &residency.Memory{}
			_, err := fmt.Sscanf(value, "%g/%g", &c.Memory.Free, &c.Memory.Tokens)
			require.NoError(t, err)
		case "live":
			c.Memory.Live = float(t, value)
		case "returns":
			c.Memory.Returns = float(t, value)
		case "coming":
			c.Coming = float(t, value)
		case "old":
			at := slices.IndexFunc(c.Memory.Old[:], func(p residency.Part) bool { return p.Tokens == 0 })
			p := &c.Memory.Old[at]
			_, err := fmt.Sscanf(value, "%g/%g/%g", &p.Tokens, &p.End, &p.Back)
			require.NoError(t, err)
			p.Middle = p.End - p.Tokens/2
		case "trial": // the first pause of its pairs is over
			c.Faults.Trial = &kvstate.LoadFaults{}
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
		case "answer":
			r.MinAnswer = number(t, value)
			r.MaxAnswer = r.MinAnswer
		case "most":
			r.MaxAnswer = number(t, value)
		case "unsplit":
			r.Split = false
		case "excluded":
			r.Excluded = strings.Split(value, ",")
		case "twice":
			r.Final = strings.Split(value, ",")
		case "failed":
			r.FailedPair[0], r.FailedPair[1], _ = strings.Cut(value, ",")
		case "trial":
			r.Trial = true
		case "must":
			r.MustPair = true
		case "model":
			r.Model = value
		case "labels":
			r.Labels = strings.Split(value, ",")
		case "ttft":
			r.TTFT = duration(t, value).Seconds()
		case "tpot":
			r.TPOT = duration(t, value).Seconds()
		case "waited":
			r.Waited = duration(t, value).Seconds()
		case "miss":
			r.OnMiss = map[string]OnMiss{"wait": MissWait, "shed": MissShed}[value]
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

func utilisation(t *testing.T, words []string) (u kvstate.Utilisation) {
	for _, w := range words {
		switch key, value, _ := strings.Cut(w, "="); key {
		case "load":
			u.Prefill = float(t, value)
		case "local":
			u.Local = float(t, value)
		case "work":
			u.Work = duration(t, value)
		case "tokenbytes":
			u.TokenBytes = float(t, value)
		case "answer":
			u.Answer = float(t, value)
		case "step":
			u.Step = float(t, value)
		case "live":
			u.Live = float(t, value)
		default:
			t.Fatalf("cannot read %q", w)
		}
	}
	return u
}

func policy(t *testing.T, words []string) Policy {
	p := DefaultPolicy()
	for _, w := range words {
		switch key, value, _ := strings.Cut(w, "="); key {
		case "split":
			p.Split = map[string]Split{"always": SplitAlways, "auto": SplitAuto, "never": SplitNever}[value]
		case "min":
			p.MinPrefillTokens = number(t, value)
		case "tpot":
			p.Promise.TPOT = duration(t, value).Seconds()
		case "answer":
			p.AnswerWeight = float(t, value)
		case "late":
			p.Late = true
		default:
			t.Fatalf("cannot read %q", w)
		}
	}
	return p
}

func duration(t *testing.T, s string) time.Duration {
	d, err := time.ParseDuration(s)
	require.NoError(t, err)
	return d
}

func float(t *testing.T, s string) float64 {
	x, err := strconv.ParseFloat(s, 64)
	require.NoError(t, err)
	return x
}
