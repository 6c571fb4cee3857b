//go:build !race

package rawconn

func willWrite(uintptr) {}

func hasRead(uintptr, []byte) {}
