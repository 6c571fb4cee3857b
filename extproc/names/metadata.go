package names

// Decisions is the namespace of decisions in Envoy's dynamic metadata.
const Decisions = "tandem"

// Metadata is one value of Envoy's dynamic metadata: a text or, where that is empty, a number.
type Metadata struct {
	Name, Text string
	Number     float64
}
