package admission

import (
	"testing"

	"github.com/stretchr/testify/require"

	"tandem/kvstate"
	"tandem/kvstate/residency"
	"tandem/picker"
)

// crowd is a host: an engine whose memory conversations take that are expected back.
type crowd struct {
	*room
	live float64 // tokens of those
	held int     // blocks of a hundred that the engine holds of any prompt
	how  []Outcome
}

func newCrowd(t *testing.T) *crowd {
	r := newRoom(t, 1)
	spec := kvstate.EndpointSpec{Name: "e", Addr: "e", Role: kvstate.RoleBoth}
	r.view.Endpoints = []kvstate.Candidate{{Endpoint: &kvstate.Endpoint{EndpointSpec: spec}, Usable: true}}
	return &crowd{room: r}
}

func (c *crowd) Fleet() *kvstate.View {
	c.view.Endpoints[0].Memory = &residency.Memory{Tokens: 1e6, Free: 1e5, Live: c.live}
	c.view.Load.Live = c.live
	return &c.view
}

func (c *crowd) Look(id uint64, v *kvstate.View) *picker.Request {
	v.Endpoints[0].Hit = c.held
	c.room.Look(id, v).Blocks = 100
	return &c.request
}

func (c *crowd) Send(id uint64, _ *picker.Request, _ *kvstate.View, x picker.Choice, err error, how Outcome) {
	require.NoError(c.t, err)
	c.sent, c.how = append(c.sent, id), append(c.how, how)
	c.live += float64(x.PromptTokens)
}

func (c *crowd) arrive(q *Queue, id uint64, tokens int64, now float64) {
	c.tokens[id] = tokens
	q.Arrive(&picker.Picker{Policy: picker.Policy{Model: picker.DefaultModel(), Late: true, AnswerWeight: .5}}, c, id, now, .5)
}

func (c *crowd) dispatch(q *Queue, now float64) {
	q.Dispatch(&picker.Picker{Policy: picker.Policy{Model: picker.DefaultModel(), Late: true, AnswerWeight: .5}}, c, now, .5)
}

// Prompts of which nothing is cached wait for memory, the shortest first. They hold nobody back who finds room, or whose
// prompt is short or there already.
func TestColdPromptsWaitForMemory(t *testing.T) {
	c, q := newCrowd(t), &Queue{}
	c.live = 580_000
	c.arrive(q, 1, 90_000, 0)
	c.arrive(q, 2, 60_000, 0)
	require.Empty(t, c.sent)
	require.False(t, q.WaitsForMemory(1), "nobody has looked yet: it may be another reason")
	c.dispatch(q, 1)
	require.True(t, q.WaitsForMemory(1))
	require.False(t, q.WaitsForMemory(3))
	c.arrive(q, 3, 2_000, 1)
	c.held = 95
	c.arrive(q, 4, 70_000, 1)
	require.Equal(t, []uint64{3, 4}, c.sent)

	c.held, c.live = 0, 450_000
	c.dispatch(q, 1.1)
	require.Len(t, c.sent, 2, "they are looked at again after a while")
	c.dispatch(q, 1.3)
	require.Equal(t, []uint64{3, 4, 2, 1}, c.sent, "60,000 and 90,000 tokens: the fleet has room again")
}

// One at a time: what was admitted counts for the next.
func TestWhatIsAdmittedCounts(t *testing.T) {
	c, q := newCrowd(t), &Queue{}
	c.live = 620_000
	for i := range uint64(4) {
		c.arrive(q, i, 50_000, 0)
	}
	c.dispatch(q, 1)
	require.Empty(t, c.sent)
	c.live = 510_000
	c.dispatch(q, 2)
	require.Len(t, c.sent, 1)
}

// The wait has an end, whatever the memory.
func TestTheWaitForMemoryEnds(t *testing.T) {
	c, q := newCrowd(t), &Queue{}
	c.live = 700_000
	c.arrive(q, 1, 90_000, 0)
	c.dispatch(q, 1)
	require.True(t, q.Expire(&picker.Picker{Policy: picker.Policy{Model: picker.DefaultModel(), Late: true}}, c, 1))
	require.Equal(t, []Outcome{Expired}, c.how)
	require.Zero(t, q.Len())
}
