package operator

import (
	"cmp"
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"

	"tandem/internal/guard"
	"tandem/kvstate"
	"tandem/kvstate/redisstore"
)

const (
	patience     = time.Second     // for the answers to a question
	syncEvery    = 5 * time.Second // maximum interval at which orders are compared with Redis
	block        = time.Second     // of a blocking read: for this time it does not notice that the replica ends
	retryAfter   = 100 * time.Millisecond
	streamTTL    = time.Minute      // of the stream of questions
	streamLength = 1000             // in entries, about
	answerTTL    = 10 * time.Second // of an answer that is not fetched
	readAtOnce   = 64
	maxAsking    = 8       // questions that this replica asks at once
	maxQuestion  = 4 << 10 // bytes
	maxAnswer    = 8 << 20 // bytes
	maxName      = 300
)

// Kinds of entries.
const (
	kindMark   = "mark"   // start of a replica's reading
	kindOrders = "orders" // there are new orders
	kindAsk    = "ask"
)

// entry is an entry of the stream of questions.
type entry struct{ kind, about, question, text string }

// Operator is one replica's part. Its methods may be called concurrently.
type Operator struct {
	redis  redisstore.Access
	state  *kvstate.State
	log    *slog.Logger
	name   string                                  // of this replica, for people
	answer map[string]func(question []byte) []byte // by the subject of the question

	syncing sync.Mutex
	synced  time.Time     // when orders were last compared with Redis; for run alone
	asking  chan struct{} // a token for each question in progress

	mu     sync.Mutex
	logged map[uint64]*seen // the others whose presence is in the log
	away   bool             // Redis did not answer the last time
	back   time.Time        // when it answered again; zero: it has always answered
}

// New returns the operator of a replica. It does nothing before it is used.
func New(store *redisstore.Store, state *kvstate.State, log *slog.Logger) *Operator {
	access := store.Access()
	self, _ := access.Roster.Self()
	return &Operator{
		redis: access, state: state, log: log, name: self.Name,
		answer: map[string]func([]byte) []byte{}, asking: make(chan struct{}, maxAsking), logged: map[uint64]*seen{},
	}
}

// Answer registers f for the questions of other replicas about a subject: f returns the answer, nil if it has none.
// Call it before [Operator.Run].
func (o *Operator) Answer(about string, f func(question []byte) []byte) { o.answer[about] = f }

// ErrBusy means that this replica has too many questions in progress.
var ErrBusy = errors.New("too many questions at once: try again")

// Answers are the answers to a question, oldest replica first. Silent lists the living replicas that did not answer,
// by name, or by their start time if they started a moment ago.
type Answers struct {
	Of        []Answer
	Silent    []string
	Gone      []Gone // by name
	Restarted []Gone // did not end in order either, and another replica has their name since
}

// Answer is one replica's answer.
type Answer struct {
	Replica uint64
	Name    string
	Body    []byte
}

// Ask asks all other living replicas about a subject, and waits for a second at most. An error means that Redis did not
// take the question or give out the answers, or [ErrBusy]; the replicas without an answer are then silent, too.
func (o *Operator) Ask(ctx context.Context, about string, question []byte) (Answers, error) {
	of, silent, err := o.ask(ctx, entry{kind: kindAsk, about: about, text: string(question)})
	out := Answers{Of: of}
	slices.SortFunc(out.Of, func(a, b Answer) int { return cmp.Compare(a.Replica, b.Replica) })
	o.mu.Lock()
	defer o.mu.Unlock()
	others := o.redis.Roster.Others()
	living := o.redis.Living() // a replica that died while it was asked is gone, and not silent as well
	for _, id := range silent {
		if slices.Contains(living, id) {
			out.Silent = append(out.Silent, o.nameOf(id, others))
		}
	}
	if !o.settled() { // no replica could report itself, and those that were there may still run
		for id, other := range o.logged {
			if !slices.Contains(living, id) && !others[id].Ended {
				out.Silent = append(out.Silent, other.name)
			}
		}
	}
	slices.Sort(out.Silent)
	o.addGone(&out, living, others)
	return out, err
}

func (o *Operator) ask(ctx context.Context, e entry) (of []Answer, silent []uint64, err error) {
	for _, id := range o.redis.Living() {
		if id != o.redis.Replica {
			silent = append(silent, id)
		}
	}
	if len(silent) == 0 {
		return nil, nil, nil
	}
	select {
	case o.asking <- struct{}{}:
		defer func() { <-o.asking }()
	default:
		return nil, silent, ErrBusy
	}
	deadline := time.Now().Add(patience)
	// otherwise the connection would be closed with the last read
	ctx, cancel := context.WithDeadline(ctx, deadline.Add(within))
	defer cancel()
	var id [16]byte
	_, _ = rand.Read(id[:]) // never fails (crypto/rand)
	e.question = hex.EncodeToString(id[:])
	if _, err := o.add(ctx, e); err != nil {
		return nil, silent, fmt.Errorf("asking the other replicas: %w", err)
	}
	defer o.forget(ctx, e.question)
	for from := "0"; len(silent) > 0 && ctx.Err() == nil; {
		left := time.Until(deadline)
		if left < time.Millisecond { // 0 would block for ever
			break
		}
		streams, err := o.redis.Client.XRead(ctx, &redis.XReadArgs{
			Streams: []string{o.answersKey(e.question), from}, Count: readAtOnce, Block: left,
		}).Result()
		if errors.Is(err, redis.Nil) { // nothing more within the time
			break
		}
		if err != nil {
			return of, silent, fmt.Errorf("reading the answers of the other replicas: %w", err)
		}
		for _, m := range streams[0].Messages {
			from = m.ID
			signed, replica := fields(&m)
			name, _ := m.Values["n"].(string)
			text, ok := o.redis.Genuine(o.answersKey(e.question)+" "+name, signed)
			if i := slices.Index(silent, replica); ok && i >= 0 && len(text) <= maxAnswer && len(name) <= maxName {
				silent = slices.Delete(silent, i, i+1)
				of = append(of, Answer{replica, name, []byte(text)})
			}
		}
	}
	return of, silent, nil
}

func fields(m *redis.XMessage) (text string, replica uint64) {
	text, _ = m.Values["b"].(string)
	number, _ := m.Values["r"].(string)
	replica, _ = strconv.ParseUint(number, 16, 64)
	return text, replica
}

// key returns a key. All have one hash tag, so a Cluster stores them on one node.
func (o *Operator) key(name string) string { return o.redis.Prefix + "{operator}:" + name }

// forget removes the answers to a question, even after its deadline.
func (o *Operator) forget(ctx context.Context, question string) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), within)
	defer cancel()
	_ = o.redis.Client.Unlink(ctx, o.answersKey(question)).Err()
}

// purpose is what an entry of the stream of questions is signed for.
func (o *Operator) purpose(kind, about, question string) string {
	return o.streamKey() + " " + kind + " " + about + " " + question
}

func (o *Operator) streamKey() string { return o.key("questions") }
func (o *Operator) answersKey(question string) string {
	return o.key("answers:" + question)
}

// add adds an entry to the stream of questions and returns its id.
func (o *Operator) add(ctx context.Context, e entry) (id string, err error) {
	ctx, cancel := context.WithTimeout(ctx, within)
	defer cancel()
	pipe := o.redis.Client.Pipeline()
	added := pipe.XAdd(ctx, &redis.XAddArgs{
		Stream: o.streamKey(), MaxLen: streamLength, Approx: true,
		Values: []any{
			"r", strconv.FormatUint(o.redis.Replica, 16), "k", e.kind, "a", e.about, "q", e.question,
			"b", o.redis.Sign(o.purpose(e.kind, e.about, e.question), []byte(e.text)),
		},
	})
	pipe.PExpire(ctx, o.streamKey(), streamTTL)
	if _, err := pipe.Exec(ctx); err != nil {
		return "", err
	}
	return added.Val(), nil
}

// Run answers questions and synchronises orders until ctx ends.
func (o *Operator) Run(ctx context.Context) {
	guard.Keep(ctx, "operator", func() { o.run(ctx) })
}

func (o *Operator) run(ctx context.Context) {
	from := "" // nothing was read yet, or Redis did not answer: questions of that time are not answered
	for ctx.Err() == nil {
		next, err := o.read(ctx, from)
		if from = next; err == nil {
			o.heard()
		} else if ctx.Err() == nil {
			o.lost()
			o.log.Debug("reading operators' questions from redis", "err", err)
			select {
			case <-ctx.Done():
			case <-time.After(retryAfter):
			}
		}
	}
}

// read handles the entries after from, and returns the position that it has read to.
func (o *Operator) read(ctx context.Context, from string) (next string, err error) {
	if from == "" { // reading "from the end" would lose entries between two reads
		if from, err = o.add(ctx, entry{kind: kindMark}); err != nil {
			return "", err
		}
		return from, o.syncNow(ctx)
	}
	if time.Since(o.synced) >= syncEvery {
		if err := o.syncNow(ctx); err != nil {
			return "", err
		}
	}
	reading, cancel := context.WithTimeout(ctx, block+within)
	defer cancel()
	streams, err := o.redis.Client.XRead(reading, &redis.XReadArgs{
		Streams: []string{o.streamKey(), from}, Count: readAtOnce, Block: block,
	}).Result()
	if errors.Is(err, redis.Nil) {
		return from, nil
	}
	if err != nil {
		return "", err
	}
	synced := false
	for _, m := range streams[0].Messages {
		from = m.ID
		signed, replica := fields(&m)
		if replica == o.redis.Replica {
			continue
		}
		kind, _ := m.Values["k"].(string)
		about, _ := m.Values["a"].(string)
		name, _ := m.Values["q"].(string)
		question, ok := o.redis.Genuine(o.purpose(kind, about, name), signed)
		if !ok {
			continue
		}
		if kind == kindOrders && !synced { // the hash contains those of later entries too
			if err := o.syncNow(ctx); err != nil {
				return "", err
			}
			synced = true
		}
		answer := o.answer[about]
		if kind == kindAsk && answer != nil && len(question) <= maxQuestion && len(name) == 2*16 {
			o.reply(ctx, name, answer([]byte(question)))
		}
	}
	return from, nil
}

func (o *Operator) syncNow(ctx context.Context) error {
	o.synced = time.Now()
	return o.Sync(ctx)
}

// reply adds an answer to a question's stream.
func (o *Operator) reply(ctx context.Context, question string, answer []byte) {
	if answer == nil || len(answer) > maxAnswer {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, within)
	defer cancel()
	key := o.answersKey(question)
	pipe := o.redis.Client.Pipeline()
	pipe.XAdd(ctx, &redis.XAddArgs{
		Stream: key, Values: []any{"r", strconv.FormatUint(o.redis.Replica, 16), "n", o.name,
			"b", o.redis.Sign(key+" "+o.name, answer)},
	})
	pipe.PExpire(ctx, key, answerTTL)
	if _, err := pipe.Exec(ctx); err != nil {
		o.log.Debug("answering an operator's question", "err", err)
	}
}
