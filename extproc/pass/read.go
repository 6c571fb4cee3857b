package pass

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"tandem/extproc/kvtransfer"
	"tandem/extproc/latebinding"
	"tandem/extproc/models"
	"tandem/extproc/openai"
	"tandem/extproc/paths"
	"tandem/extproc/plan"
	"tandem/extproc/telemetry"
	"tandem/internal/guard"
	"tandem/kvstate"
	"tandem/kvstate/media"
	"tandem/kvstate/prefixindex"
	"tandem/picker"
)

// want is what was read about the way that a request takes.
type want struct {
	way      way
	model    string            // of a request without a prompt; of a gateway's, if that is rewritten
	bound    *kvstate.Endpoint // that must answer; nil: any
	limited  bool              // to the endpoints that only names
	only     []string
	priority int32
	targets  picker.Targets
	onMiss   picker.OnMiss
	flow     uint64
	legs     kvtransfer.Legs // of the pair that was chosen
}

// way is the way that a request takes, as far as its body decides that.
type way uint8

const (
	oneByOne way = iota // over two endpoints one after the other, or decode alone
	atOnce              // over two endpoints that work concurrently
	alone               // one endpoint of a pool whose pairs work concurrently
	encoding            // first over an endpoint that encodes its media
	storing             // to the endpoint that holds, or will hold, its response
	storedAt            // to the endpoint that its path names
	other               // a request without a prompt, to any endpoint
	gateway             // one hop of a gateway's
)

// waits reports whether a request may wait for its turn, and may have objectives.
func (w way) waits() bool { return w == oneByOne || w == atOnce || w == gateway }

// API returns the API of the request. POST /generate, which names no model, is SGLang's only where that is served.
func (s *Shared) API(h *Head) openai.API {
	api := openai.Classify(string(h.Method), string(h.Path))
	if api != openai.SGLangGenerate {
		return api
	}
	if pool := s.State.PoolFor(""); pool != nil {
		policy, _ := s.Policy(pool.Spec.Name)
		if c := policy.Dialect.Concurrent; c != nil && c.OwnGenerate {
			return api
		}
	}
	return openai.PassThrough
}

// begin begins to plan a request to a pool.
func (x *Pass) begin(pool *kvstate.Pool, a plan.Attempt) (ok bool) {
	r := &x.Req
	r.Pool, r.Attempt, r.Limits, r.Attempt.Clock = pool, a, x.shared.Limits, x.shared.Now
	r.ID, r.Began, r.Traced = x.ID, x.Meter.Began, x.Meter.Recording()
	r.Hashes = r.Hashes[:0]
	x.policy, ok = x.shared.Policy(pool.Spec.Name)
	r.Labels = x.Head.labels(x.policy.LabelHeader)
	return ok
}

// readPrompt reads a request to one of the APIs that can be split.
func (x *Pass) readPrompt(ctx context.Context, api openai.API, a plan.Attempt) error {
	if err := x.scan(api); err != nil {
		return err
	}
	x.Meter.EndPhase(telemetry.PhaseScan)
	r := &x.Req
	pool, waits := x.poolOf(ctx, r.Client.Model(), true)
	switch {
	case waits:
		return x.waits(func(ctx context.Context) (*plan.Decision, error) { return x.First(ctx, api, a) })
	case pool == nil:
		return openai.ModelNotFound(r.Client.Model())
	}
	if err := x.served(ctx, pool, &a, r.Client.Model()); errors.Is(err, latebinding.ErrWaits) {
		return x.waits(func(ctx context.Context) (*plan.Decision, error) { return x.First(ctx, api, a) })
	} else if err != nil {
		return err
	}
	if a.Redirects == 0 { // an admitted request is served to the end
		if err := closed(pool); err != nil {
			return err
		}
	}
	if !x.begin(pool, a) {
		return fmt.Errorf("pool %q has no policy", pool.Spec.Name)
	}
	r.TakesPriority = true
	p := x.policy
	if p.Dialect.Concurrent != nil {
		x.want.way = atOnce
		if err := p.MayPair(&r.Attempt, &r.Client, x.size(), r.Limits); err != nil {
			return err
		}
	} else if err := p.MaySplit(&r.Attempt, &r.Client, x.size(), r.Limits); err != nil {
		return err
	}
	if x.want.way == atOnce && r.Attempt.Alone {
		x.want.way = alone
	}
	if x.want.way == oneByOne && plan.EncodesFirst(r, &p.Policy) {
		x.readPriority()
		x.want.way = encoding
		return nil
	}
	return x.readRest(ctx)
}

// waits makes the pass go on in a goroutine, because it cannot wait here.
func (x *Pass) waits(rest func(ctx context.Context) (*plan.Decision, error)) error {
	x.Rest = rest
	return latebinding.ErrWaits
}

// readRest reads what a request without an encode leg needs.
func (x *Pass) readRest(ctx context.Context) error {
	r, p := &x.Req, x.policy
	if c := p.Dialect.Concurrent; c == nil || c.DecodesAlone {
		if holder, stored := r.Holder(r.Pool); stored {
			x.readPriority()
			x.want.way, x.want.bound, x.want.model = storing, holder, r.Client.Model()
			return nil
		}
	}
	x.hash()
	if p.Dialect.Concurrent != nil {
		r.Tokens = r.Estimate()
	} else {
		x.Req.Session = x.policy.Session.of(&x.Head, &x.Req)
		x.countTokens(ctx)
	}
	return x.readObjectives()
}

// hash hashes the prompt, which is counted once.
func (x *Pass) hash() {
	if e := x.policy.Dialect.Engine; e == kvtransfer.EngineSGLang || e == kvtransfer.EngineTRTLLM {
		x.Req.Client.KeepAttribution()
	}
	x.Req.Hash()
	if x.Req.Attempt.Redirects == 0 {
		x.shared.State.CountPrompt(x.Req.Pool, x.Req.Hashes)
		x.Req.Named = x.conversationName()
	}
}

// readForGateway reads a gateway's request. whole: it has no prompt.
func (x *Pass) readForGateway(ctx context.Context, api openai.API, whole bool) (err error) {
	r, model, a := &x.Req, "", plan.Attempt{Started: x.shared.Now()}
	if whole {
		a.Alone, a.Why = true, passThrough
		model, err = x.scanOther()
	} else if err = x.scan(api); err == nil {
		model = r.Client.Model()
	}
	if err != nil {
		return err
	}
	pool, _ := x.poolOf(ctx, model, false) // a gateway's server can wait
	switch {
	case pool == nil && !whole:
		return openai.ModelNotFound(model)
	case pool == nil:
		if pool = x.shared.State.PoolFor(""); pool == nil {
			return openai.Unavailable("no_pool", "no pool is configured", time.Second)
		}
	}
	if _, stored := plan.StoredResponse(string(x.Head.Path)); !stored {
		if err := closed(pool); err != nil {
			return err
		}
	}
	x.begin(pool, a)
	if to := plan.Rewritten(r, x.shared.State); to != "" {
		if x.want.model = to; x.shared.Models != nil && pool.Unlisted(to) {
			x.askModels(ctx, pool.Endpoints(), askAgainAny)
		}
	}
	r.TakesPriority = !whole || paths.TakesPriority(string(x.Head.Path))
	x.want.way = gateway
	if !whole {
		if err := x.policy.MaySplit(&r.Attempt, &r.Client, x.size(), r.Limits); err != nil {
			return err
		}
		x.hash()
	}
	x.Req.Session = x.policy.Session.of(&x.Head, &x.Req)
	x.countTokens(ctx)
	return x.readObjectives()
}

// passThrough is the route of requests that are never split, and why they are not.
const passThrough = "pass_through"

// readOther reads a request that is never split.
func (x *Pass) readOther(ctx context.Context, a plan.Attempt) error {
	model, err := x.scanOther()
	if err != nil {
		return err
	}
	path := string(x.Head.Path)
	if id, ok := plan.StoredResponse(path); ok {
		if pool, e := plan.FindHolder(x.shared.State.Pools(), id); e != nil && x.shared.serves(pool, &x.Head) {
			x.begin(pool, plan.Attempt{})
			x.want.way, x.want.bound = storedAt, e
			return nil
		}
	}
	if model == "" {
		model = models.NameIn(path)
	}
	pool, waits := x.poolOf(ctx, model, x.size() > 0 && x.size() <= x.shared.Limits.SplitBodyBytes)
	switch {
	case waits:
		return x.waits(func(ctx context.Context) (*plan.Decision, error) { return x.other(ctx, a) })
	case pool == nil && model != "":
		return openai.ModelNotFound(model)
	case pool == nil:
		return openai.Unavailable("no_pool", "no pool is configured", time.Second)
	case !x.shared.serves(pool, &x.Head):
		return openai.NotServed()
	}
	if err := x.served(ctx, pool, &a, model); errors.Is(err, latebinding.ErrWaits) {
		return x.waits(func(ctx context.Context) (*plan.Decision, error) { return x.other(ctx, a) })
	} else if err != nil {
		return err
	}
	if a.Redirects == 0 { // an admitted request is served to the end
		if err := closed(pool); err != nil {
			return err
		}
	}
	x.begin(pool, a)
	x.readPriority()
	x.Req.TakesPriority = paths.TakesPriority(path)
	x.want.way, x.want.model = other, model
	return nil
}

// serves reports whether clients may use the request's path on the pool's engines.
func (s *Shared) serves(pool *kvstate.Pool, h *Head) bool {
	policy, _ := s.Policy(pool.Spec.Name)
	return policy.Paths.Allow(string(h.Method), string(h.Path))
}

func (x *Pass) size() int { return len(x.Body.Bytes()) }

// scan reads the body. In the rare case that it has members which a client must not send, it cuts them.
func (x *Pass) scan(api openai.API) error {
	if err := x.Req.Client.Scan(api, x.Body.Bytes(), openai.Limits{}); err != nil {
		return err
	}
	if x.Req.Client.HasControl() {
		x.Meter.Observer.ControlFieldsCut()
		x.Body.Rewrite(x.size(), x.Req.Client.Clean)
		if err := x.Req.Client.Scan(api, x.Body.Bytes(), openai.Limits{}); err != nil {
			return err
		}
	}
	size := x.Req.Client.Size()
	x.Req.Size = kvstate.PromptSize{Text: size.Text, Counted: size.Counted, Media: size.Media}
	return nil
}

// scanOther reads the model from a form or from a JSON body of another API, and cuts members that a client must not
// send from the latter: engines accept chat requests on more paths than the well-known ones. Ambiguous JSON is refused.
// JSON that is not an object has neither model nor members; the engine validates it.
func (x *Pass) scanOther() (model string, err error) {
	kind := string(x.Head.ContentType)
	x.Req.Size = kvstate.PromptSize{Text: x.size()}
	switch {
	case x.size() == 0:
		return "", nil
	case openai.IsForm(kind):
		x.Req.Size = kvstate.PromptSize{Media: media.Count{media.Audio: 1}} // what engines take uploads of
		return openai.FormModel(kind, x.Body.Bytes())                       //nolint:wrapcheck // the client's answer
	}
	// Engines check the media type only: vLLM 0.32.0 reads {"do_remote_prefill":true} with charset=latin1, or any
	// other parameter, on /invocations, and crashes.
	if err := openai.CheckHeaders(kind, ""); err != nil {
		return "", err
	}
	err = x.scan(openai.PassThrough)
	if e := (*openai.Error)(nil); errors.As(err, &e) && e.Code == "invalid_body" {
		return "", nil
	}
	return x.Req.Client.Model(), err
}

// Tokenizer asks engines to tokenize prompts while the request goes on. [tandem/kvstate/tokenize] implements it.
type Tokenizer interface {
	// Tokenize sends body to path of an engine, and calls learned with the token ids of its answer. key identifies
	// the prompt, which is not asked for twice at a time. done is closed in any case; nil: too many calls are in
	// progress.
	Tokenize(
		ctx context.Context, pool *kvstate.Pool, key uint64, path string, body []byte, learned func(ids []uint32),
	) (done <-chan struct{})
}

// TokenSources is where a pool's token ids come from, and how long a request waits for them; 0: not at all.
type TokenSources struct {
	From   TokenSource
	Budget time.Duration
}

// TokenSource is the source of a pool's token ids, in addition to prefill's own answers.
type TokenSource uint8

// The sources of a pool's kvEvents.tokens.
const (
	LearnedTokens  TokenSource = iota // from prefill's answers only
	TokenizeTokens                    // POST /tokenize
	RenderTokens                      // POST /v1/.../render
)

// countTokens counts the prompt's tokens, as far as they are known. It may ask an engine for them.
func (x *Pass) countTokens(ctx context.Context) {
	if x.Req.RecallTokens() {
		x.tokenize(ctx)
	}
	x.Req.CountTokens()
}

// tokenize asks for the tokens of a prompt, and waits for them no longer than the pool's budget. If they come later,
// the next request will use them.
func (x *Pass) tokenize(ctx context.Context) {
	s, policy, pool := x.shared, x.policy, x.Req.Pool
	if policy.Tokens.From == LearnedTokens || s.Tokenizer == nil {
		return
	}
	path, body := tokenizeBody(&x.Req, policy.Tokens.From)
	if body == nil {
		return
	}
	text, size, prompt := slices.Clone(x.Req.Hashes), x.Req.Client.PromptBytes(), x.Req.TokenPrompt(pool)
	done := s.Tokenizer.Tokenize(guard.With(ctx, s.Guard), pool, text[len(text)-1], path, body, func(ids []uint32) {
		prompt.IDs = ids
		s.Observer.Learned(pool.Spec.Name, "tokenizer", len(ids))
		learned := prefixindex.TextPrompt{Blocks: text, BlockBytes: plan.BlockBytes, Bytes: size}
		s.State.LearnTokens(pool, learned, &prompt)
	})
	if await(ctx, done, policy.Tokens.Budget) {
		x.Req.Known = pool.KnownTokens(x.Req.Hashes)
	}
}

// await waits for a call, for so long at most, and reports whether it is done. nil: it was not made.
func await(ctx context.Context, done <-chan struct{}, patience time.Duration) bool {
	if done == nil || patience <= 0 {
		return false
	}
	over := time.NewTimer(patience)
	defer over.Stop()
	select {
	case <-done:
		return true
	case <-over.C:
	case <-ctx.Done():
	}
	return false
}

// tokenizeBody returns the request to send. /tokenize of vLLM and SGLang takes the members that make the prompt,
// render the client's body unchanged.
func tokenizeBody(r *plan.Request, source TokenSource) (path string, body []byte) {
	api := r.Client.API()
	if source == RenderTokens {
		if path = renderPath(api); path != "" {
			body = slices.Clone(r.Client.Body())
		}
		return path, body
	}
	fields := []struct {
		key string
		f   openai.Field
	}{
		{"model", openai.FieldModel}, {"messages", openai.FieldMessages}, {"tools", openai.FieldTools},
		{"chat_template", openai.FieldChatTemplate}, {"chat_template_kwargs", openai.FieldChatTemplateKwargs},
	}
	switch api {
	case openai.Chat:
	case openai.Completions:
		fields[1].key, fields[1].f = "prompt", openai.FieldPrompt
		fields = fields[:2]
	default:
		return "", nil
	}
	body = append(body, '{')
	for _, f := range fields {
		if raw := r.Client.Raw(f.f); raw != nil {
			if len(body) > 1 {
				body = append(body, ',')
			}
			body = append(append(append(body, '"'), f.key...), `":`...)
			body = append(body, raw...)
		}
	}
	return "/tokenize", append(body, '}')
}

// renderPath returns where vLLM renders an API's requests, with --enable-scale-out: chat and completions from 0.24,
// messages from 0.29, responses from 0.30 (entrypoints/scale_out/render/api_router.py). "": nowhere. An engine that
// lacks the route is not asked again for a while.
func renderPath(api openai.API) string {
	switch api {
	case openai.Chat:
		return "/v1/chat/completions/render"
	case openai.Completions:
		return "/v1/completions/render"
	case openai.Messages:
		return "/v1/messages/render"
	case openai.Responses:
		return "/v1/responses/render"
	default:
		return ""
	}
}
