package wake

import (
	"os"
	"path/filepath"
	"testing"
	"time"

	"gpu-cdi-plugin/test/lib/testenv"
)

func TestDirectoriesAreAddedAfterOneIsMovedAndRemoved(t *testing.T) {
	w, err := NewDirWatcher()
	if err != nil {
		t.Fatal(err)
	}
	dir, other := filepath.Join(t.TempDir(), "dir"), t.TempDir()
	testenv.Must(t, os.Mkdir(dir, 0o700))
	testenv.Must(t, w.Add(dir))
	// The watcher waits until this is received. By then, the kernel has removed the watch that fsnotify wants to remove.
	testenv.Must(t, os.Mkdir(filepath.Join(dir, "first"), 0o700))
	testenv.Must(t, os.Rename(dir, dir+".moved"))
	testenv.Must(t, os.RemoveAll(dir+".moved"))
	<-w.Events
	testenv.Eventually(t, "the error about the watch that is gone", func() bool { return len(w.Errors) == 1 })
	added := make(chan error)
	go func() { added <- w.Add(other) }()
	for {
		select {
		case <-w.Events:
			continue
		case err := <-added:
			testenv.Must(t, err)
		case <-time.After(10 * time.Second):
			t.Fatal("a directory cannot be added")
		}
		break
	}
	testenv.Must(t, os.Mkdir(filepath.Join(other, "later"), 0o700))
	for e := range w.Events {
		if e.Name == filepath.Join(other, "later") {
			break
		}
	}
	testenv.Must(t, w.Close())
}
