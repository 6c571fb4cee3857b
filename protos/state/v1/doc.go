// Package statev1 is what replicas of Tandem tell each other through Redis, as a protobuf message: state.proto says what is
// in it, package redisstore writes and reads it.
package statev1
