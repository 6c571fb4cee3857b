package kvtransfer

import (
	"fmt"

	"tandem/extproc/openai"
)

// shared is every store that P and D both access by the hashes of blocks: LMCache's remote backends and LMCacheMP,
// MooncakeStoreConnector, HF3FS, FlexKV, and llm-d's shared-storage. Requests carry no parameters for it. P computes
// the prompt, which puts it into the store, and D, with the client's own body, finds it there.
//
// Block hashes must agree on P and D: the same model, dtype, block size and hash algorithm, and the same
// PYTHONHASHSEED up to vLLM 0.28 (docs/features/mooncake_store_connector_usage.md; from 0.29 sha256 needs no seed).
type shared struct{ oneToken }

func newShared() shared { return shared{newOneToken()} }

func sharedDialect(*Options) (Dialect, error) {
	d := newShared()
	return Dialect{
		Name: "shared", Engine: EngineAny, Hold: Hold{Inline: true},
		Engines: Engines{EitherLeg: true, DataRanks: true, Store: true},
		Prefill: d.Prefill, ReadAnswer: d.ReadAnswer,
		Reports: Reports{Stores: []string{"LMCacheConnectorV1", "MultiConnector"}, Alike: storeAlike()},
	}, nil
}

func (d shared) Prefill(r *openai.Request, p *openai.Patch, _ *Pair) { d.plan(r, p) }

// ReadAnswer only checks that it is a valid answer.
func (shared) ReadAnswer(body []byte, _ *Pair) (Answer, error) {
	a, _, err := usage(body)
	if err != nil {
		return Answer{}, fmt.Errorf("reading P's answer: %w", err)
	}
	return a, nil
}
