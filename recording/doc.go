// Package recording is the format of a recording of a fleet's requests, which `tandem replay` plays: what was
// asked and when, what was shared, and how long it took, without a word of any prompt. Package extproc/recorder
// makes recordings.
//
// A recording is one or more files of JSON lines, compressed with gzip (docs/recordings.md):
//
//	{"tandem_recording":1,"id":"...","from":"...","block_bytes":512,"usage":true,...}    the header of each file
//	{"fleet":{"at":...,"pools":[...]}}                                                   engines, each minute
//	{"n":7,"on":3,"same":12,"gap":4.2,"t":...,"blocks":"...","prompt":5120,...}          a request that has ended
//
// Files of one recording have one id, and belong together: a line may extend one of another file.
//
// Arrows: it imports nothing of Tandem.
package recording

// Version is the version of the format that this package writes. It reads this version only.
const Version = 1

// Header begins each file of a recording.
type Header struct {
	Version    int    `json:"tandem_recording"`
	ID         string `json:"id"`   // of the recording; its files have the same
	From       string `json:"from"` // when it began (RFC 3339)
	Release    string `json:"release,omitempty"`
	Replica    string `json:"replica,omitempty"`
	BlockBytes int    `json:"block_bytes"` // bytes of a prompt that one of its hashes stands for
	Sample     int    `json:"sample"`      // one conversation in so many is recorded
	// answers are read: their tokens, and the times of the first and of each, are known
	Usage bool    `json:"usage"`
	Salt  string  `json:"salt"`  // tells salts apart: recordings with the same one share their hashes
	Start float64 `json:"start"` // when it began, s since 1970
}

// Fleet is the pools at one moment, and what Tandem had learned of their engines.
type Fleet struct {
	At    float64 `json:"at"` // s since 1970
	Pools []Pool  `json:"pools"`
}

// Pool is a pool, with its settings.
type Pool struct {
	Name         string   `json:"name"`
	Split        string   `json:"split"` // auto, always, never
	Late         bool     `json:"late"`  // binding: late
	Roles        bool     `json:"roles"` // roles: auto
	MaxWait      float64  `json:"max_wait,omitempty"`
	AnswerWeight float64  `json:"answer_weight"`
	TTFT         float64  `json:"ttft,omitempty"` // the promise, s; 0: none
	TPOT         float64  `json:"tpot,omitempty"`
	StepTokens   float64  `json:"step_tokens,omitempty"`
	TokenBytes   float64  `json:"token_bytes,omitempty"` // of KV, learned; 0: not known
	Answer       float64  `json:"answer,omitempty"`      // mean tokens of an answer, learned
	Engines      []Engine `json:"engines"`
}

// Engine is an endpoint as it was at one moment.
type Engine struct {
	Address string  `json:"address"`
	Role    string  `json:"role"`               // prefill, decode, both
	Word    string  `json:"word,omitempty"`     // with roles: auto
	Kind    string  `json:"kind,omitempty"`     // vllm, sglang, ... as it says
	KV      int64   `json:"kv,omitempty"`       // tokens of GPU memory; 0: not reported
	Host    int64   `json:"host,omitempty"`     // of host memory
	Speed   float64 `json:"speed,omitempty"`    // learned: times as long to compute as modelled; 0: nothing
	Pace    float64 `json:"pace,omitempty"`     // likewise, of a decode step
	Link    float64 `json:"transfer,omitempty"` // likewise, of a transfer
	Out     bool    `json:"out,omitempty"`      // gets no requests
	Outside int64   `json:"external,omitempty"` // requests there that did not come through Tandem
}

// Request is one request that has ended. Times are seconds; counts of tokens are -1 where nobody knows them.
type Request struct {
	N               uint64  // its number, by arrival
	On              uint64  // the number of the request whose prompt this one extends; 0: none
	Same            int     // blocks of its prompt that are those of On
	Gap             float64 // from the end of On's answer to its arrival; negative: it came before
	T               float64 // arrival, from the header's start
	Pool            string
	Model           string // a name that the pool has, or a salted hash
	Who             string // the tenant's salted hash; "": none is known
	Priority        int32
	Blocks          []uint64 // all of them; in the file those behind Same. 48 bits each
	Bytes           int      // of the prompt
	Prompt          int64    // tokens ...
	Guess           bool     // ... which are an estimate of Tandem's
	Cached          int64    // of those, found in a cache
	Answer          int64
	Stream          bool
	Route           string // split, decode_alone, pass_through
	Prefill, Decode string // addresses of engines
	Replans         int
	// in the queue; P's leg; to the answer's head; to its first token; per token; in all
	Waited, P, Head, First, Each, Took float64
	Status                             int
	Ended                              string // ok, refused, failed, client_gone
}
