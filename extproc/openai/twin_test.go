package openai

import (
	"bytes"
	"encoding/json"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// The dumb twin: the same work over encoding/json, slow and short, for tests to compare with.

// slowMember is one member: the decoded key, and the value as it stands; "" if it was deleted.
type slowMember struct{ key, value string }

func slowMembers(t testing.TB, object []byte) []slowMember {
	t.Helper()
	d := json.NewDecoder(bytes.NewReader(object))
	_, err := d.Token()
	require.NoError(t, err)
	all := []slowMember{}
	for d.More() {
		key, err := d.Token()
		require.NoError(t, err)
		var value json.RawMessage
		require.NoError(t, d.Decode(&value))
		all = append(all, slowMember{key.(string), string(value)})
	}
	return all
}

func decoded(t testing.TB, text []byte) (s string) {
	t.Helper()
	require.NoError(t, json.Unmarshal(text, &s))
	return s
}

func isObject(value string) bool { return strings.HasPrefix(value, "{") }

// hasDuplicates looks for duplicate keys in the objects of a scope. encoding/json decodes all unpaired surrogates to
// U+FFFD, so those keys are left out.
func hasDuplicates(t testing.TB, object []byte) bool {
	t.Helper()
	inner := map[string]bool{"sampling_params": true, "vllm_xargs": true, "extra_args": true}
	seen := map[string]bool{}
	for _, m := range slowMembers(t, object) {
		if seen[m.key] && !strings.ContainsRune(m.key, '\uFFFD') {
			return true
		}
		seen[m.key] = true
		if inner[m.key] && isObject(m.value) && hasDuplicates(t, []byte(m.value)) {
			return true
		}
	}
	return false
}

// slowPatch is Patch, over lists of members.
type slowPatch struct {
	members  []slowMember
	front    []slowMember
	sampling *slowPatch
}

func newSlowPatch(t testing.TB, object []byte) *slowPatch {
	t.Helper()
	p := &slowPatch{members: slowMembers(t, object), sampling: &slowPatch{}}
	if s := p.get("sampling_params"); isObject(s) {
		p.sampling.members = slowMembers(t, []byte(s))
	}
	return p
}

func (p *slowPatch) get(key string) string {
	for _, m := range p.members {
		if m.key == key {
			return m.value
		}
	}
	return ""
}

func (p *slowPatch) set(key, value string) {
	for _, list := range [...][]slowMember{p.members, p.front} {
		for i := range list {
			if list[i].key == key {
				list[i].value = value
				return
			}
		}
	}
	p.front = append(p.front, slowMember{key, value})
}

func (p *slowPatch) delete(key string) {
	for i := range p.members {
		if p.members[i].key == key {
			p.members[i].value = ""
		}
	}
}

// result returns the expected members after the patch, sampling_params among them, in order.
func (p *slowPatch) result() (top, sampling []slowMember) {
	sampling = p.sampling.left()
	if s := p.get("sampling_params"); len(p.sampling.front) > 0 && (s == "" || s == "null") {
		p.set("sampling_params", "{}")
	} else if !isObject(s) {
		sampling = nil
	}
	return p.left(), sampling
}

func (p *slowPatch) left() []slowMember {
	left := []slowMember{}
	for _, m := range slices.Concat(p.front, p.members) {
		if m.value != "" {
			left = append(left, m)
		}
	}
	return left
}
