package jsontext

import (
	"math"
	"regexp"
	"strconv"
	"strings"
)

// pydantic in lax mode, in which vLLM validates bodies: text and truth values become numbers, and the other way round.

var intText = regexp.MustCompile(`^[+-]?[0-9]+(_[0-9]+)*(\.0+)?$`)

// LaxInteger is Integer for a member of a request model: 3, 3.0, true, "3", " 3.0 " and "3_0" are integers. One that is
// too great for int64 becomes the greatest.
func LaxInteger(raw []byte) (int64, bool) {
	switch {
	case IsNull(raw):
		return 0, false
	case string(raw) == "true":
		return 1, true
	case string(raw) == "false":
		return 0, true
	case !IsString(raw):
		return Integer(raw)
	}
	text := strings.TrimSpace(string(Text(raw)))
	if !intText.MatchString(text) {
		return 0, false
	}
	whole, _, _ := strings.Cut(strings.ReplaceAll(text, "_", ""), ".")
	n, err := strconv.ParseInt(whole, 10, 64)
	if err != nil {
		n = math.MaxInt64
	}
	return n, true
}

// LaxBool reads a truth value likewise: true, 1, 1.0, "yes", "ON".
func LaxBool(raw []byte) (v, ok bool) {
	if IsString(raw) {
		switch strings.ToLower(string(Text(raw))) {
		case "1", "true", "t", "yes", "y", "on":
			return true, true
		case "0", "false", "f", "no", "n", "off":
			return false, true
		}
		return false, false
	}
	n, ok := LaxInteger(raw)
	return n == 1, ok && n|1 == 1
}
