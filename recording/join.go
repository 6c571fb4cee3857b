package recording

import (
	"cmp"
	"slices"
)

// join makes one recording of several, each of which is ordered and complete: their requests by arrival, numbered anew.
//
// Hashes of recordings with one salt are comparable, so a conversation is found whose turns went to several replicas.
// Those of other salts are made different, which they are but for chance: nobody knows what their prompts share.
func join(parts []*Recording) *Recording {
	slices.SortStableFunc(parts, func(a, b *Recording) int { return cmp.Compare(a.Start, b.Start) })
	out := &Recording{Header: parts[0].Header}
	type from struct{ part, request int }
	var order []from
	for i, p := range parts {
		out.Usage = out.Usage && p.Usage
		for j := range p.Requests {
			p.Requests[j].T += p.Start - parts[0].Start
			order = append(order, from{i, j})
		}
		out.Parts = append(out.Parts, Part{p.Header, p.Requests[len(p.Requests)-1].T})
	}
	if len(parts) == 1 {
		out.Requests = parts[0].Requests
		return out
	}
	slices.SortStableFunc(order, func(a, b from) int {
		return cmp.Compare(parts[a.part].Requests[a.request].T, parts[b.part].Requests[b.request].T)
	})
	salts := map[string]uint64{}
	numbers := make([]map[uint64]uint64, len(parts)) // new ones, by the old
	for i, p := range parts {
		numbers[i] = map[uint64]uint64{}
		if _, ok := salts[p.Salt]; !ok {
			salts[p.Salt] = uint64(len(salts)) << (8 * hashBytes)
		}
	}
	for n, o := range order {
		p := parts[o.part]
		numbers[o.part][p.Requests[o.request].N] = uint64(n + 1)
	}
	of := make([]int, 0, len(order)) // the parts of the requests
	for _, o := range order {
		p := parts[o.part]
		q := p.Requests[o.request]
		q.N, q.On = numbers[o.part][q.N], numbers[o.part][q.On]
		if q.On == 0 || q.On >= q.N { // the line of the one before is lost
			q.On, q.Gap = 0, 0
		}
		if salt := salts[p.Salt]; salt > 0 {
			blocks := make([]uint64, len(q.Blocks))
			for i, b := range q.Blocks {
				blocks[i] = b ^ salt
			}
			q.Blocks = blocks
		}
		out.Requests, of = append(out.Requests, q), append(of, o.part)
	}
	if len(salts) < len(parts) {
		out.cross(of)
	}
	return out
}

// cross finds requests that continue a conversation of another part. A part finds its own by their bytes. Here whole
// blocks alone are known, and thousands of prompts may have one system prompt and less than a block more. So the
// longest earlier prompt with which one begins counts only if its last block is of that conversation alone: no other
// one ends with it, and all that have more go on alike. Its answer must have ended.
func (r *Recording) cross(of []int) {
	blocks := map[uint64]*joint{}
	at := func(b uint64) *joint {
		if blocks[b] == nil {
			blocks[b] = &joint{latest: -1}
		}
		return blocks[b]
	}
	roots := make([]int, len(r.Requests)) // as their own parts know them
	for i := range r.Requests {
		q := &r.Requests[i]
		if roots[i] = i; q.On > 0 {
			roots[i] = roots[q.On-1]
		}
		for n, b := range q.Blocks {
			j := at(b)
			if n == len(q.Blocks)-1 {
				j.ends = append(j.ends, roots[i])
				break
			}
			next := q.Blocks[n+1]
			j.several = j.several || j.next != 0 && j.next != next
			j.next = next
		}
	}
	for i := range r.Requests {
		q := &r.Requests[i]
		for n := len(q.Blocks) - 1; n > q.Same; n-- { // what it has beyond the one before it in its part
			j := blocks[q.Blocks[n-1]]
			if j.latest < 0 {
				continue
			}
			before := &r.Requests[j.latest]
			if ended := before.T + before.Took; j.alone() && of[j.latest] != of[i] && ended <= q.T {
				q.On, q.Same, q.Gap = before.N, n, q.T-ended
				r.Crossed++
			}
			break
		}
		if n := len(q.Blocks); n > 0 {
			blocks[q.Blocks[n-1]].latest = i
		}
	}
}

// joint is what goes on behind a block.
type joint struct {
	next    uint64
	several bool  // other blocks follow it, too
	ends    []int // conversations that have a prompt that ends with it
	latest  int   // of those prompts, up to now; -1: none
}

// alone reports whether one conversation at most has the block.
func (j *joint) alone() bool {
	return !j.several && !slices.ContainsFunc(j.ends, func(root int) bool { return root != j.ends[0] })
}
