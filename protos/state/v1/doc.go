// Package statev1 is the messages that replicas of Tandem exchange through Redis: state.proto documents them, package
// redisstore writes and reads them.
package statev1
