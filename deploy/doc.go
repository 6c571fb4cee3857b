// Package deploy holds what Tandem is deployed with: an image, manifests (kustomize, Helm), resources for Envoy Gateway
// and for the Gateway API Inference Extension, and examples of engines. Its only code is tests. They read each manifest
// strictly as its kind: core kinds through Kubernetes' own types, others through the CRDs of the releases that
// docs/kubernetes.md names. A manifest that was broken on purpose is refused.
package deploy
