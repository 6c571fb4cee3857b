package extproc

import (
	"cmp"
	"errors"
	"time"

	"tandem/extproc/envoywire"
	"tandem/extproc/openai"
	"tandem/extproc/plan"
	"tandem/kvstate"
	"tandem/picker"
)

// PickerOptions are options of the Endpoint Picker protocol.
type PickerOptions struct {
	Fallbacks    int  // endpoints listed after the chosen one
	WatchBody    bool // keep the stream until the answer ends, instead of until it begins
	ShedRequests int  // reservations on every decode endpoint from which on requests of negative priority get 429
	Conformance  bool // support the headers of the Inference Extension's conformance suite; for tests only
}

// picked is the choice for one request in the Endpoint Picker protocol.
type picked struct {
	pool      *kvstate.Pool // nil: nothing was chosen
	endpoint  *kvstate.Endpoint
	sidecar   *plan.SidecarHeaders // nil: no sidecar
	list      string               // the endpoint and its fallbacks, for the gateway
	edits     openai.Edits
	booked    kvstate.ReservationID
	tokens    int64
	rewritten string // the model that the request was sent to; "": the requested one
	asked     string
}

// endpointPicker handles streams of gateways that speak the Endpoint Picker protocol.
type endpointPicker struct{ firstPass }

// serve serves one request of a gateway that knows the Endpoint Picker protocol only. It has one pass, which writes
// the destination into a header and into dynamic metadata. Then the answer follows, from which the server learns
// which endpoint gave it and when it ended. The reservations are released with the stream, however that ends.
func (x endpointPicker) serve() error {
	if err := x.receive(); err != nil {
		return err
	}
	if x.msg.Phase != envoywire.PhaseRequestHeaders {
		return errors.New("the first message of a stream was not request headers")
	}
	began := time.Now()
	x.identify()
	p, err := x.pick()
	defer func() { x.s.State.Release(p.booked) }()
	if err != nil {
		return err
	}
	h := &x.headers
	h.Set(envoywire.HeaderEndpoint, []byte(p.list))
	if x.newID {
		h.Set(envoywire.HeaderRequestID, []byte(x.requestID))
	}
	setSidecar(h, p.sidecar)
	x.setExplanation()
	if err := x.sendOn(p.edits, append(envoywire.Destination(p.list), x.decision...)); err != nil {
		return err
	}
	x.s.metrics.Processed(envoywire.RolePicker, time.Since(began), x.Busy, nil)
	_ = x.followAnswer(&p) // however it ends, nothing more can be reported
	return errAnswered
}

// pick chooses the endpoint of a request.
func (x endpointPicker) pick() (picked, error) {
	h := &x.msg.Headers
	if len(h.Upgrade) > 0 {
		return picked{}, openai.BadRequest("upgrade_not_supported", "", "protocol upgrades are not supported here")
	}
	h.Path, _ = x.s.withoutPrefix(h.Path) // for the decision only: the gateway rewrites paths itself
	api := openai.Classify(string(h.Method), string(h.Path))
	if (api == openai.PassThrough || api == openai.SGLangGenerate) && !x.s.served(string(h.Method), string(h.Path)) {
		return picked{}, openai.NotServed()
	}
	if x.msg.EndOfStream || api == openai.PassThrough || api == openai.Models {
		return x.pickOther()
	}
	if err := openai.CheckHeaders(string(h.ContentType), string(h.ContentEncoding)); err != nil {
		return picked{}, err
	}
	if err := x.receiveBody(x.s.MaxBodyBytes); err != nil {
		return picked{}, err
	}
	if err := x.scan(api); err != nil {
		return picked{}, err
	}
	pool := x.s.State.PoolFor(x.req.Model())
	if pool == nil {
		return picked{}, openai.ModelNotFound(x.req.Model())
	}
	a := plan.Attempt{Started: time.Now()}
	policy, _ := x.s.policy(pool.Spec.Name)
	if err := policy.MaySplit(&a, &x.req, x.body.Len(), x.s.limits()); err != nil {
		return picked{}, err
	}
	return x.pickSplit(pool, policy, &a)
}

// pickOther chooses any decode endpoint, for requests without a body or of another API.
func (x endpointPicker) pickOther() (picked, error) {
	if err := x.checkBody(); err != nil {
		return picked{}, err
	}
	if err := x.receiveBody(x.s.MaxBodyBytes); err != nil {
		return picked{}, err
	}
	model, err := x.scanOther()
	if err != nil {
		return picked{}, err
	}
	pool := x.s.State.PoolFor(model)
	if pool == nil {
		pool = x.s.State.PoolFor("")
	}
	if pool == nil {
		return picked{}, openai.Unavailable("no_pool", "no pool is configured", time.Second)
	}
	x.hashes = x.hashes[:0]
	policy, _ := x.s.policy(pool.Spec.Name)
	return x.pickSplit(pool, policy, &plan.Attempt{Started: time.Now(), Alone: true, Why: "pass_through"})
}

// pickSplit chooses among the endpoints that the gateway allows.
func (x endpointPicker) pickSplit(pool *kvstate.Pool, policy Policy, a *plan.Attempt) (picked, error) {
	p := picked{pool: pool, tokens: pool.PromptTokens(x.body.Len())}
	if a.Why != "pass_through" {
		x.hashes = x.req.PromptHash(x.hashes[:0], blockBytes, maxBlocks)
		x.s.State.CountPrompt(pool, x.hashes)
	}
	x.s.State.View(pool, x.hashes, &x.view)
	if x.session = x.sessionOf(policy.Session); x.session != 0 {
		x.s.State.MarkSession(pool, x.session, &x.view)
	}
	p.tokens = x.countTokens(pool, &policy, p.tokens)
	x.allow()
	request := picker.Request{PromptTokens: p.tokens, Blocks: len(x.hashes), Model: x.req.Model(), Rand: random()}
	if err := x.applyObjectives(pool, &policy, &request); err != nil {
		return p, err
	}
	if err := x.shed(&request); err != nil {
		return p, err
	}
	if err := x.toHolderOf(pool, a); err != nil {
		return p, err
	}
	request.Split = !a.Alone
	choice, err := x.choose(pool, &policy, &request, a)
	x.explain(pool, &request)
	if err != nil {
		return p, policy.NoEndpoint(pool, err)
	}
	if choice.Prefill < 0 {
		if err := policy.RefuseAlone(pool, cmp.Or(a.Why, x.unpairedReason())); err != nil {
			return p, err
		}
	}
	d := x.view.Endpoints[choice.Decode].Endpoint
	p.endpoint = d
	p.booked = x.reserve(d, kvstate.RoleDecode, 0, choice.DecodeBooking())
	x.committed()
	p.list = x.withFallbacks(&request, choice)
	x.rewriteModel(&p)
	split := "decode_alone"
	var prefill *kvstate.Endpoint
	if choice.Prefill >= 0 {
		var edits openai.Edits
		if prefill, edits, err = x.handOver(pool, policy, choice, p.tokens, p.rewritten, a); err != nil {
			return p, err
		}
		p.edits = merge(edits, p.edits)
		if prefill != nil || edits != nil {
			split = "split"
		}
	}
	p.sidecar = x.sidecarHeaders(&policy, computes(choice), prefill)
	x.s.State.Routed(pool, d, x.hashes)
	var at *kvstate.Endpoint
	if choice.Prefill >= 0 {
		at = x.view.Endpoints[choice.Prefill].Endpoint
	}
	x.setAffinity(pool, x.session, at, d)
	x.planned(pool, split, a.Why, at, d, p.tokens)
	return p, nil
}

// dropped reports in the Inference Extension's terms why a request was not served.
func dropped(i *envoywire.Immediate, e *openai.Error) {
	switch e.Status {
	case 429:
		i.Headers.Set(envoywire.HeaderDropped, []byte(envoywire.ReasonSaturated))
	case 503:
		i.Headers.Set(envoywire.HeaderDropped, []byte(envoywire.ReasonNoEndpoints))
	}
}
