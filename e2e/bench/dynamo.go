package main

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"strconv"
	"time"

	"tandem/e2e/bench/http1"
	"tandem/e2e/process"
)

// Dynamo's selection service (PyPI ai-dynamo, `python -m dynamo.select_service`) chooses engines by their KV events and
// the load that callers report, and forwards nothing. Here the client does the rest: it has the prompt tokenized (an
// engine's render path), asks for a prefill and for a decode engine, makes both hops through an Envoy like the floor's,
// and reports when they have ended. Each role is a routing group.
const dynamoName = "dynamo-select"

func (l *lab) startDynamo(ctx context.Context, o options, p peer) error {
	if !o.events {
		return errors.New("the selection service of Dynamo takes KV events: -kv-events")
	}
	ports, err := process.FreePorts(3)
	if err != nil {
		return err
	}
	s := &stack{name: p.name, addr: ports[0], selector: ports[2], renderers: map[string]string{}, pairs: l.pairs}
	s.envoy, err = l.startEnvoy(ctx, o, p.name, fmt.Appendf(nil, floorConfig, port(ports[1]), port(ports[0])), ports[1])
	if err != nil {
		return err
	}
	service, err := l.Start(p.name, nil, p.binary, "-m", "dynamo.select_service", "--port", port(ports[2]))
	if err != nil {
		return err
	}
	s.routers = append(s.routers, service)
	if err := service.Wait(ctx, "http://"+s.selector+"/health"); err != nil {
		return err
	}
	for _, model := range o.models() {
		if s.renderers[model], err = l.renderer(ctx, model); err != nil {
			return err
		}
		for i, e := range l.pairs[model] {
			if err := s.register(ctx, model, "prefill", 2*i, e.prefill, e.prefillEvents); err != nil {
				return err
			}
			if err := s.register(ctx, model, "decode", 2*i+1, e.decode, e.decodeEvents); err != nil {
				return err
			}
		}
	}
	l.stacks = append(l.stacks, s)
	return service.Wait(ctx, "http://"+s.selector+"/ready")
}

// register tells the service of an engine.
func (s *stack) register(ctx context.Context, model, group string, id int, addr, events string) error {
	text, err := json.Marshal(map[string]any{
		"worker_id": id, "model_name": model, "routing_group": group, "endpoint": "http://" + addr, "block_size": 16,
		"kv_events_endpoints": map[string]string{"0": "tcp://" + host(addr) + ":" + events},
		"total_kv_blocks":     1 << 16, "max_num_batched_tokens": 8192,
	})
	if err != nil {
		return err
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://"+s.selector+"/workers", bytes.NewReader(text))
	if err != nil {
		return err
	}
	req.Header.Set("content-type", "application/json")
	answer, err := http.DefaultClient.Do(req)
	if err != nil {
		return err
	}
	defer answer.Body.Close()
	if answer.StatusCode != http.StatusCreated {
		return fmt.Errorf("registering %s: status %d", addr, answer.StatusCode)
	}
	return nil
}

// askDynamo sends one request over the engines that the service chooses.
func (c *client) askDynamo(s *stack, model string, b *body, id uint64) (firstByte time.Time, err error) {
	renderer, err := c.At(s.renderers[model])
	if err != nil {
		return firstByte, err
	}
	selector, err := c.At(s.selector)
	if err != nil {
		return firstByte, err
	}
	if _, err := renderer.Send("POST /v1/chat/completions/render", id, "", b.client); err != nil {
		return firstByte, fmt.Errorf("render: %w", err)
	}
	_, tokens, _ := bytes.Cut(renderer.Answer, []byte(`"token_ids":`))
	end := bytes.IndexByte(tokens, ']') + 1
	if end == 0 {
		return firstByte, fmt.Errorf("render: no tokens in %.300s", renderer.Answer)
	}
	p, err := reserve(selector, model, "prefill", id, tokens[:end])
	if err != nil {
		return firstByte, err
	}
	d, err := reserve(selector, model, "decode", id, tokens[:end])
	if err != nil {
		return firstByte, err
	}
	// what is reserved at decode has no prompt to compute
	line := "POST /reservations/decode" + strconv.FormatUint(id, 10) + "/prefill_complete"
	if _, err := selector.Send(line, id, ""); err != nil {
		return firstByte, fmt.Errorf("%s: %w", line, err)
	}
	firstByte, err = c.askTwice(c.Conn, c.Conn, pair{prefill: p, decode: d}, b, id)
	for _, group := range [2]string{"prefill", "decode"} {
		_, failed := selector.Send("DELETE /reservations/"+group+strconv.FormatUint(id, 10), id, "")
		err = cmp.Or(err, failed)
	}
	return firstByte, err
}

// reserve asks for an engine, and returns its address.
func reserve(c *http1.Conn, model, group string, id uint64, tokens []byte) (string, error) {
	head := fmt.Appendf(nil, `{"selection_id":"%s%d","model_name":%q,"routing_group":%q,"token_ids":`, group, id, model,
		group)
	if _, err := c.Send("POST /select_and_reserve", id, "", head, tokens, []byte("}")); err != nil {
		return "", fmt.Errorf("choosing for %s: %w", group, err)
	}
	var chosen struct{ Endpoint string }
	if err := json.Unmarshal(c.Answer, &chosen); err != nil {
		return "", fmt.Errorf("choosing for %s: %w", group, err)
	}
	return chosen.Endpoint[len("http://"):], nil
}
