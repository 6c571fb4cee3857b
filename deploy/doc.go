// Package deploy holds what Tandem is deployed with: an image, manifests (kustomize, Helm), the resources for Envoy Gateway
// and for the Gateway API Inference Extension, examples of engines. Its code is tests alone: every manifest is read strictly
// as the kind that it says it is, core kinds through Kubernetes' own types and the others through the CRDs of the releases
// that docs/kubernetes.md names, and a manifest that was broken on purpose is refused.
package deploy
