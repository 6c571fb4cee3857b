package kvtransfer

import (
	"errors"
	"fmt"
	"unicode/utf8"

	"tandem/extproc/openai"
)

// EncodedMember is the member of a prefill request that names the encodings of a prompt's media.
const EncodedMember = "ec_transfer_params"

// ReadEncoded returns ec_transfer_params from the answer of an encode endpoint: an object with an object for each of
// the media, by its hash (vLLM 0.33.0, docs/features/disagg_encoder.md). The inner objects are between the engines and
// pass unread, as P's parameters do. nil: the engine names none, and P encodes by itself. An error wraps [ErrParams]
// if the answer is JSON.
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

// checkEncoded counts the media that raw names.
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
