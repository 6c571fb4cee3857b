package engine

// Clock is virtual time: events in order of time; events of the same moment in the order of After's calls.
type Clock struct {
	Now    float64 // seconds
	events []event
	asked  uint64
}

type event struct {
	at    float64
	order uint64
	do    func()
}

func (e *event) before(o *event) bool { return e.at < o.at || (e.at == o.at && e.order < o.order) }

// After schedules an event that many seconds from now.
func (c *Clock) After(seconds float64, do func()) {
	c.asked++
	c.events = append(c.events, event{c.Now + max(seconds, 0), c.asked, do})
	for i := len(c.events) - 1; i > 0; {
		up := (i - 1) / 2
		if !c.events[i].before(&c.events[up]) {
			break
		}
		c.events[i], c.events[up] = c.events[up], c.events[i]
		i = up
	}
}

// Step runs the next event; false if there is none.
func (c *Clock) Step() bool {
	if len(c.events) == 0 {
		return false
	}
	next, last := c.events[0], len(c.events)-1
	c.events[0] = c.events[last]
	c.events[last] = event{}
	c.events = c.events[:last]
	for i := 0; ; {
		least := i
		for down := 2*i + 1; down <= 2*i+2 && down < last; down++ {
			if c.events[down].before(&c.events[least]) {
				least = down
			}
		}
		if least == i {
			break
		}
		c.events[i], c.events[least] = c.events[least], c.events[i]
		i = least
	}
	c.Now = next.at
	next.do()
	return true
}
