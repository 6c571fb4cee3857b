package orders

import (
	"errors"
	"net/http"
	"net/url"
	"strconv"
	"time"
)

// ReadRecording reads an order that begins a recording: for how long, and of how many conversations one is recorded.
// Settings that it does not have stay as they are.
func ReadRecording(q url.Values, lasts *time.Duration, sample *int) error {
	if text := q.Get("for"); text != "" {
		d, err := time.ParseDuration(text)
		if err != nil || d < 0 {
			return errors.New("for must be a duration, such as 1h")
		}
		*lasts = d
	}
	if text := q.Get("sample"); text != "" {
		n, err := strconv.Atoi(text)
		if err != nil || n < 1 || n > 10_000 {
			return errors.New("sample must be a number from 1 to 10000: one conversation in so many is recorded")
		}
		*sample = n
	}
	return nil
}

// Allowed passes requests with the operator's token on to an order that is not of this package.
func (o *Orders) Allowed(next http.HandlerFunc) http.HandlerFunc { return o.allowed(next) }
