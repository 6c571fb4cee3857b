package kvtransfer

import (
	"errors"
	"fmt"
	"unicode/utf8"

	"tandem/extproc/openai"
)

// EncodedMember is the member in which an engine that prefills is told where the encodings of a prompt's media are.
const EncodedMember = "ec_transfer_params"

// ReadEncoded takes ec_transfer_params from the answer of an engine that only encodes: an object with an object for each of
// the media, by its hash (vLLM 0.33.0, docs/features/disagg_encoder.md). What stands in those is between the engines and
// passes unread, as P's parameters do. nil: the engine names none, and P encodes by itself. An error wraps [ErrParams] where
// the answer is JSON.
func ReadEncoded(answer []byte) ([]byte, error) {
	scanned, err := openai.ScanAnswer(answer)
	if err != nil {
		return nil, fmt.Errorf("reading an encode endpoint's answer: %w", err)
	}
	if scanned.Encoded == nil {
		return nil, nil
	}
	n, err := checkEncoded(scanned.Encoded)
	if err != nil {
		return nil, fmt.Errorf("%s: %w: %w", EncodedMember, ErrParams, err)
	}
	if n == 0 {
		return nil, nil
	}
	return scanned.Encoded, nil
}

// checkEncoded counts the media that raw tells of.
func checkEncoded(raw []byte) (int, error) {
	switch {
	case len(raw) > MaxParamsBytes:
		return 0, fmt.Errorf("%d bytes, more than %d", len(raw), MaxParamsBytes)
	case !utf8.Valid(raw): // P would refuse the client's whole body
		return 0, errNotJSON
	}
	seen := map[string]bool{}
	c := cursor{b: raw}
	err := c.object(func(key, value []byte, _ int) error {
		switch {
		case len(key) == 0:
			return errors.New("a hash is empty")
		case seen[string(key)]: // P might take the other one
			return fmt.Errorf("%.64q is there twice", key)
		case value[0] != '{':
			return refuse(key, value, "an object")
		}
		seen[string(key)] = true
		return nil
	})
	return len(seen), err
}
