// Package envoygatewayv1 is the part of Envoy Gateway's extension protocol that Tandem serves, with Envoy's resources
// as bytes. It is a copy and not Envoy Gateway's own Go module, whose 300 dependencies would decide the releases of
// ours (docs/adr/0039).
package envoygatewayv1
