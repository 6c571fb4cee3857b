package extproc

import (
	"cmp"
	"errors"
	"time"

	"tandem/extproc/endpointpicker"
	"tandem/extproc/envoywire"
	"tandem/extproc/kvtransfer"
	"tandem/extproc/openai"
	"tandem/extproc/paths"
	"tandem/extproc/plan"
	"tandem/kvstate"
	"tandem/picker"
)

// picked is the choice for one request in the Endpoint Picker protocol.
type picked struct {
	pool      *kvstate.Pool // nil: nothing was chosen
	endpoint  *kvstate.Endpoint
	prefill   *kvstate.Endpoint    // that the sidecar asks; nil: none
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
	switch x.msg.Phase {
	case envoywire.PhaseRequestHeaders:
	case envoywire.PhaseResponseHeaders:
		return x.passAnswer()
	default:
		return errors.New("the first message of a stream was neither request headers nor response headers")
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
	endpointpicker.SetSidecar(h, p.sidecar)
	x.setExplanation()
	if err := x.sendOn(p.edits, append(envoywire.Destination(p.list), x.decision...)); err != nil {
		return err
	}
	x.s.observer.Processed(envoywire.RolePicker, time.Since(began), x.Busy, nil)
	_ = x.followAnswer(&p) // however it ends, nothing more can be reported
	return errAnswered
}

// pick chooses the endpoint of a request.
func (x endpointPicker) pick() (picked, error) {
	h := &x.msg.Headers
	if len(h.Upgrade) > 0 {
		return picked{}, openai.BadRequest("upgrade_not_supported", "", "protocol upgrades are not supported here")
	}
	h.Path, _ = paths.WithoutPrefix(x.s.PathPrefixes, h.Path) // for the decision only: the gateway rewrites paths itself
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
	x.describe(pool, plan.Attempt{Started: x.s.now()})
	policy, _ := x.s.policy(pool.Spec.Name)
	if err := policy.MaySplit(&x.req.Attempt, &x.req.Request, x.body.Len(), x.req.Limits); err != nil {
		return picked{}, err
	}
	return x.pickSplit(policy)
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
	x.describe(pool, plan.Attempt{Started: x.s.now(), Alone: true, Why: "pass_through"})
	policy, _ := x.s.policy(pool.Spec.Name)
	return x.pickSplit(policy)
}

// pickSplit chooses among the endpoints that the gateway allows.
func (x endpointPicker) pickSplit(policy *Policy) (picked, error) {
	r, pool := &x.req, x.req.Pool
	if r.Why == "pass_through" {
		r.Hashes = r.Hashes[:0]
	} else {
		r.Hash()
		x.s.State.CountPrompt(pool, r.Hashes)
	}
	x.s.State.View(pool, r.Hashes, &x.view)
	if r.Session = x.sessionOf(policy.Session); r.Session != 0 {
		x.s.State.MarkSession(pool, r.Session, &x.view)
	}
	x.countTokens(policy)
	p := picked{pool: pool, tokens: r.Tokens}
	endpointpicker.Allow(&x.view, &x.msg, x.s.Picker)
	request := r.Ask(&policy.Policy, p.tokens, !r.Alone)
	if err := x.applyObjectives(policy, &request); err != nil {
		return p, err
	}
	if err := endpointpicker.Shed(&request, &x.view, x.s.Picker); err != nil {
		return p, err
	}
	if r.Why != "pass_through" {
		if err := endpointpicker.ToHolder(r, &x.view); err != nil {
			return p, err
		}
	}
	if request.Split = !r.Alone; r.Alone {
		request.MustPair = false
	}
	choice, err := x.choose(policy, &request)
	if err != nil {
		return p, policy.NoEndpoint(pool, err)
	}
	if choice.Prefill < 0 {
		if err := policy.RefuseAlone(pool, cmp.Or(r.Why, policy.Unpaired(&x.view, choice.Uncached))); err != nil {
			return p, err
		}
	}
	d := x.view.Endpoints[choice.Decode].Endpoint
	p.endpoint = d
	p.booked = x.reserve(d, kvstate.RoleDecode, 0, choice.DecodeBooking(&x.view))
	x.waiter.Committed()
	p.list = endpointpicker.Fallbacks(&x.picker, &request, &x.view, choice, x.s.Picker)
	p.rewritten, p.edits = endpointpicker.Rewrite(r, x.s.State)
	p.asked = r.Model()
	split := "decode_alone"
	var prefill *kvstate.Endpoint
	if choice.Prefill >= 0 {
		var edits openai.Edits
		if prefill, edits, err = x.handOver(policy, choice, p.rewritten); err != nil {
			return p, err
		}
		p.edits = endpointpicker.Merge(edits, p.edits)
		if prefill != nil || edits != nil {
			split = "split"
		}
	}
	p.prefill = prefill
	p.sidecar = plan.Sidecar(r, &x.view, choice, &policy.Policy, prefill)
	x.s.State.Routed(pool, d, r.Hashes)
	var at *kvstate.Endpoint
	if choice.Prefill >= 0 {
		at = x.view.Endpoints[choice.Prefill].Endpoint
	}
	x.setAffinity(pool, r.Session, at, d)
	x.planned(pool, split, r.Why, at, d, p.tokens, r.Started, 0)
	return p, nil
}

// handOver plans the call to P for a request whose second hop is not Envoy's. prefill is set if the sidecar has the
// prompt computed; edits are those of the client's body for D. model is the name to ask P for, "": the client's.
func (x firstPass) handOver(policy *Policy, c picker.Choice, model string) (prefill *kvstate.Endpoint, edits openai.Edits, err error) {
	if policy.Handoff == plan.HandoffSidecar {
		prefill = x.view.Endpoints[c.Prefill].Endpoint
		x.s.State.Routed(x.req.Pool, prefill, x.req.Hashes)
		return prefill, nil, nil
	}
	h := &x.msg.Headers
	edits, err = x.s.direct.Prefill(x.stream.Context(), &endpointpicker.Call{
		Request: &x.req, View: &x.view, Picker: &x.picker, Policy: &policy.Policy, Model: model,
		Path: string(h.Path), Authorization: string(h.Authorization), Source: sourceOf(x.stream.Context()), Observer: directObserver(x),
	}, c)
	return nil, edits, err
}

// directObserver counts the prefill calls that the server makes for a request.
type directObserver firstPass

func (x directObserver) Reserved() { x.waiter.Committed() }

func (x directObserver) PrefillCalled(endpoint, result string, took time.Duration) {
	x.HopEnded(x.req.Pool.Spec.Name, "prefill", endpoint, result, took, x.Exemplar)
}

func (x directObserver) PromptCounted(got kvtransfer.Answer) {
	x.Prompt(x.req.Pool.Spec.Name, got)
}
