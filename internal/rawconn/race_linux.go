//go:build race

package rawconn

import (
	"runtime"
	"syscall"
	"unsafe"
)

// The race detector takes what is written to a socket to have happened before what is read from any, where it sees the calls of
// package syscall. A call that reads or writes nothing stands for ours.

func willWrite(fd uintptr) { _, _ = syscall.Write(int(fd), nil) }

func hasRead(fd uintptr, p []byte) {
	_, _ = syscall.Read(int(fd), nil)
	if len(p) > 0 {
		runtime.RaceWriteRange(unsafe.Pointer(unsafe.SliceData(p)), len(p))
	}
}
