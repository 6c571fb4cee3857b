// Package replica is one running replica of Tandem: it wires the fleet's state and who keeps it (fleet.go, pools.go,
// discovery.go, redis.go), the server that Envoy asks, the operators' port (admin.go), and changes of the configuration
// file (reload.go). [Serve] runs one beside Envoy.
package replica
