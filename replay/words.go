package replay

import "tandem/picker/roles"

// startWords begins to give the endpoints words, as a server does.
func (r *replica) startWords() {
	var decide func()
	decide = func() {
		waiting := 0.0
		for _, w := range r.queue.Waiting() {
			waiting += w.Work
		}
		f := roles.Of(r.Fleet(), &r.picker.Policy, waiting)
		for _, c := range f.Changes() {
			e := r.view.Endpoints[c.At].Endpoint
			r.publish(func(other *replica) { other.state.SetWord(other.pool.Endpoint(e.Addr), c.Word) })
			r.state.SetWord(e, c.Word)
			if r.config.Changed != nil {
				r.config.Changed(r.Now, c)
			}
		}
		r.After(roles.Every, decide)
	}
	decide()
}
