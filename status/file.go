package status

import (
	"strings"
	"time"

	"tandem/status/words"
)

// File compares a replica's configuration file with what is in force.
type File struct {
	Fingerprint string    `json:"-"`                 // of the pools' configuration in force
	Refused     string    `json:"refused,omitempty"` // why the file as it is now is not in force; "": it is
	Waits       bool      `json:"waits,omitempty"`   // it is valid, and in force after a restart of Envoy and Tandem
	Since       time.Time `json:"since,omitzero"`    // when it was refused
	Restart     []string  `json:"restart,omitempty"` // paths of its settings that take a restart of Tandem
	Envoy       []string  `json:"envoy,omitempty"`   // paths of its settings that printed bootstraps do not have yet
	Outdated    time.Time `json:"outdated,omitzero"` // when the last one came
}

// The age to which a bootstrap is called outdated: Tandem does not see when Envoy gets a new one. And the longest
// reason that is shown.
const (
	outdatedFor = time.Hour
	maxRefusal  = 600 // bytes
)

// files adds notices about replicas' configuration files.
func files(s *Status, add func(bad bool, doc, format string, values ...any)) {
	for i := range s.Replicas {
		who := "This replica"
		if i > 0 {
			who = "Replica " + s.Replicas[i].Name
		}
		file := s.Replicas[i].File
		if len(s.Envoys) > 0 { // they have their configuration over xDS
			file.Envoy = nil
		}
		file.notices(s.Now, who, add)
	}
}

// notices adds what of a replica's file is not in force. who is the replica in a sentence.
func (f *File) notices(now time.Time, who string, add func(bad bool, doc, format string, values ...any)) {
	const doc = "operations.md#change-without-restart"
	if f.Refused != "" {
		reason := strings.Join(strings.Fields(strings.ReplaceAll(f.Refused, "\n", "; ")), " ")
		if len(reason) > maxRefusal {
			reason = strings.ToValidUTF8(reason[:maxRefusal], "") + " ..."
		}
		reason = strings.TrimSuffix(strings.ReplaceAll(reason, ":; ", ": "), ".")
		if f.Waits {
			add(true, doc, "%s waits with a change of its configuration file (%s) and goes on with the one before: %s.",
				who, words.MinutesAgo(now.Sub(f.Since)), reason)
			return
		}
		add(true, doc, "%s refused its configuration file (%s) and goes on with the one before; "+
			"it would not start with this one: %s.", who, words.MinutesAgo(now.Sub(f.Since)), reason)
	}
	if len(f.Restart) > 0 {
		add(false, doc, "%s has not taken up these changes of its configuration file, since they take a restart: %s.",
			who, words.List(f.Restart))
	}
	if len(f.Envoy) > 0 && now.Sub(f.Outdated) < outdatedFor {
		add(false, doc, "Envoys with a printed bootstrap lack these changes of the configuration (%s): %s. "+
			"Print it again (tandem envoy) and restart them. This is said for an hour.",
			words.MinutesAgo(now.Sub(f.Outdated)), words.List(f.Envoy))
	}
}
