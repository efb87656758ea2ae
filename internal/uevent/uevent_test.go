package uevent

import (
	"errors"
	"io"
	"os"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"gpu-cdi-plugin/test/lib/testenv"
)

// messages is a source of messages.
type messages []string

func (m *messages) Read(p []byte) (int, error) {
	if len(*m) == 0 {
		return 0, io.EOF
	}
	n := copy(p, (*m)[0])
	*m = (*m)[1:]
	return n, nil
}

func TestWatch(t *testing.T) {
	fields := func(list ...string) string { return strings.Join(list, "\x00") + "\x00" }
	const header = "add@/devices/pci0000:00/0000:00:01.0/0000:01:00.0"
	for name, c := range map[string]struct {
		message string
		want    int
	}{
		"a GPU is added": {fields(header, "ACTION=add", "SUBSYSTEM=pci", "PCI_CLASS=30200", "PCI_SLOT_NAME=0000:01:00.0"), 1},
		"a GPU is bound": {fields(header, "ACTION=bind", "DRIVER=nvidia", "SUBSYSTEM=pci", "PCI_CLASS=30000"), 1},
		"a network card": {fields(header, "ACTION=add", "SUBSYSTEM=pci", "PCI_CLASS=20000"), 0},
		"an old bridge":  {fields(header, "ACTION=add", "SUBSYSTEM=pci", "PCI_CLASS=60400"), 0},
		"a USB device":   {fields(header, "ACTION=add", "SUBSYSTEM=usb", "PCI_CLASS=30200"), 0},
		"no variables":   {header, 0},
		"nothing":        {"", 0},
	} {
		t.Run(name, func(t *testing.T) {
			got := 0
			err := Watch(&messages{c.message}, func() { got++ })
			if got != c.want || !errors.Is(err, io.EOF) {
				t.Errorf("%d changes and error %v, want %d and the end of the source", got, err, c.want)
			}
		})
	}
}

// overflow is a source that has dropped messages.
type overflow struct{ rest messages }

func (o *overflow) Read(p []byte) (int, error) {
	if o.rest == nil {
		o.rest = messages{"add@/x\x00SUBSYSTEM=pci\x00PCI_CLASS=30200\x00"}
		return 0, &os.PathError{Op: "read", Path: "uevents", Err: unix.ENOBUFS}
	}
	return o.rest.Read(p)
}

func TestWatchAfterAnOverflow(t *testing.T) {
	got := 0
	if err := Watch(&overflow{}, func() { got++ }); got != 2 || !errors.Is(err, io.EOF) {
		t.Errorf("%d changes and error %v, want one for the dropped messages and one for the next", got, err)
	}
}

func TestListenEndsWhenItIsClosed(t *testing.T) {
	source, err := Listen()
	if err != nil {
		t.Fatal(err)
	}
	ended := make(chan error)
	go func() { ended <- Watch(source, func() {}) }()
	if err := source.Close(); err != nil {
		t.Error(err)
	}
	if err := <-ended; err == nil {
		t.Error("watching a closed source ended without an error")
	}
}

// Other devices are none of our business, whatever the kernel sends.
func TestUeventsOfTheKernel(t *testing.T) {
	testenv.NetworkNamespace(t)
	source, err := Listen()
	if err != nil {
		t.Fatal(err)
	}
	changes, ended := make(chan struct{}, 100), make(chan error)
	go func() { ended <- Watch(source, func() { changes <- struct{}{} }) }()
	const path = "/devices/pci0000:00/0000:00:01.0/0000:01:00.0"
	gpu := []string{"SUBSYSTEM=pci", "PCI_CLASS=30200", "PCI_SLOT_NAME=0000:01:00.0"}
	testenv.SendUevent(t, "add@/devices/virtual/mem/null", "ACTION=add", "SUBSYSTEM=mem", "DEVNAME=null")
	for _, action := range []string{"add", "bind", "unbind", "remove"} {
		testenv.SendUevent(t, append([]string{action + "@" + path, "ACTION=" + action, "DEVPATH=" + path}, gpu...)...)
	}
	for range 4 {
		select {
		case <-changes:
		case <-time.After(10 * time.Second):
			t.Fatal("a uevent of a GPU is not noticed")
		}
	}
	_ = source.Close()
	if err := <-ended; err == nil {
		t.Error("watching a closed source ended without an error")
	}
	if n := len(changes); n > 0 {
		t.Errorf("%d more changes", n)
	}
}

func FuzzAboutGPU(f *testing.F) {
	f.Add([]byte("add@/x\x00SUBSYSTEM=pci\x00PCI_CLASS=30200\x00"))
	f.Fuzz(func(t *testing.T, message []byte) {
		if aboutGPU(message) && !strings.Contains(string(message), "pci") {
			t.Error("a message without pci is about a GPU on PCI")
		}
	})
}
