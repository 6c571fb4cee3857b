package recording

import (
	"encoding/base64"
	"encoding/json"
	"strconv"
	"unicode/utf8"
)

// hashBytes is how many bytes of a hash are in a file.
const hashBytes = 6

// Mask returns what a file keeps of a hash.
func Mask(hash uint64) uint64 { return hash & (1<<(8*hashBytes) - 1) }

// Append appends the line of a request, which allocates nothing but room in dst. Blocks has those behind Same only.
func Append(dst []byte, r *Request) []byte {
	dst = append(dst, `{"n":`...)
	dst = strconv.AppendUint(dst, r.N, 10)
	if r.On > 0 {
		dst = append(dst, `,"on":`...)
		dst = strconv.AppendUint(dst, r.On, 10)
		dst = number(dst, "same", float64(r.Same), 0)
		dst = append(dst, `,"gap":`...)
		dst = strconv.AppendFloat(dst, r.Gap, 'f', 6, 64)
	}
	dst = append(dst, `,"t":`...)
	dst = strconv.AppendFloat(dst, r.T, 'f', 6, 64)
	dst = text(text(text(dst, "pool", r.Pool), "model", r.Model), "who", r.Who)
	dst = number(dst, "priority", float64(r.Priority), 0)
	if len(r.Blocks) > 0 {
		dst = append(dst, `,"blocks":"`...)
		for _, h := range r.Blocks {
			dst = base64.RawURLEncoding.AppendEncode(dst, []byte{byte(h >> 40), byte(h >> 32),
				byte(h >> 24), byte(h >> 16), byte(h >> 8), byte(h)})
		}
		dst = append(dst, '"')
	}
	dst = number(dst, "bytes", float64(r.Bytes), 0)
	dst = known(dst, "prompt", r.Prompt)
	if r.Guess {
		dst = append(dst, `,"guess":true`...)
	}
	dst = known(known(dst, "cached", r.Cached), "answer", r.Answer)
	if r.Stream {
		dst = append(dst, `,"stream":true`...)
	}
	dst = text(text(text(dst, "route", r.Route), "prefill", r.Prefill), "decode", r.Decode)
	dst = number(dst, "replans", float64(r.Replans), 0)
	for _, x := range [...]struct {
		name string
		s    float64
	}{{"waited", r.Waited}, {"p", r.P}, {"head", r.Head}, {"first", r.First}, {"each", r.Each}, {"took", r.Took}} {
		dst = number(dst, x.name, x.s, 6)
	}
	dst = number(dst, "status", float64(r.Status), 0)
	return append(text(dst, "ended", r.Ended), "}\n"...)
}

// number appends a member unless it is 0.
func number(dst []byte, name string, x float64, digits int) []byte {
	if x == 0 {
		return dst
	}
	dst = append(append(append(dst, `,"`...), name...), `":`...)
	return strconv.AppendFloat(dst, x, 'f', digits, 64)
}

// known appends a count unless nobody knows it.
func known(dst []byte, name string, n int64) []byte {
	if n < 0 {
		return dst
	}
	dst = append(append(append(dst, `,"`...), name...), `":`...)
	return strconv.AppendInt(dst, n, 10)
}

// text appends a member unless it is empty.
func text(dst []byte, name, s string) []byte {
	if s == "" {
		return dst
	}
	dst = append(append(append(dst, `,"`...), name...), `":`...)
	for i := range len(s) {
		if c := s[i]; c < ' ' || c == '"' || c == '\\' || c >= utf8.RuneSelf {
			quoted, _ := json.Marshal(s) // a string: it cannot fail
			return append(dst, quoted...)
		}
	}
	return append(append(append(dst, '"'), s...), '"')
}
