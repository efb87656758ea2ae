package sim

import (
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// The socket on which a reader gets uevents, and the file with all that were sent, in text.
const (
	ueventSocket = "uevents.sock"
	ueventLog    = ownDir + "/uevents"
)

// ueventTimeout is how long a reader with a full queue may take.
const ueventTimeout = 5 * time.Second

// uevent is a message of the kernel about a device. The text has the order of kobject_uevent_env in
// lib/kobject_uevent.c.
type uevent struct {
	action, devpath, subsystem string
	env                        []string // what the device adds
}

// pciEvent is a uevent of the GPU's PCI device. The driver is named only while it is bound, and the kernel drops the
// module alias from unbind.
func pciEvent(action string, g *GPU) uevent {
	e := uevent{action: action, devpath: strings.TrimPrefix(g.sysDir(), "sys"), subsystem: "pci"}
	if action == "bind" {
		e.env = append(e.env, "DRIVER=nvidia")
	}
	vendor, device := g.Device&0xffff, g.Device>>16
	subVendor, subDevice := g.Subsystem&0xffff, g.Subsystem>>16
	e.env = append(e.env,
		fmt.Sprintf("PCI_CLASS=%X", g.Class), fmt.Sprintf("PCI_ID=%04X:%04X", vendor, device),
		fmt.Sprintf("PCI_SUBSYS_ID=%04X:%04X", subVendor, subDevice), "PCI_SLOT_NAME="+g.Bus)
	if action != "unbind" {
		e.env = append(e.env, fmt.Sprintf("MODALIAS=pci:v%08Xd%08Xsv%08Xsd%08Xbc%02Xsc%02Xi%02X", vendor, device,
			subVendor, subDevice, g.Class>>16, g.Class>>8&0xff, g.Class&0xff))
	}
	return e
}

// drmEvent is a uevent of one of the GPU's nodes in /dev/dri.
func drmEvent(action string, g *GPU, name string) uevent {
	return uevent{
		action: action, devpath: strings.TrimPrefix(g.sysDir(), "sys") + "/drm/" + name, subsystem: "drm",
		env: []string{
			fmt.Sprintf("MAJOR=%d", majorDRM), fmt.Sprintf("MINOR=%d", driMinor(name)), "DEVNAME=dri/" + name,
			"DEVTYPE=drm_minor",
		},
	}
}

// message returns what a netlink socket gets: lines that end in NUL.
func (e uevent) message(sequence int64) []byte {
	lines := append([]string{
		e.action + "@" + e.devpath, "ACTION=" + e.action, "DEVPATH=" + e.devpath, "SUBSYSTEM=" + e.subsystem,
	}, e.env...)
	lines = append(lines, fmt.Sprintf("SEQNUM=%d", sequence))
	return []byte(strings.Join(lines, "\x00") + "\x00")
}

// Uevents returns the source of the node's uevents from now on: each Read returns one message, as a read of a netlink
// socket does. A node has one reader; a later one takes its place.
func (n *Node) Uevents() (*net.UnixConn, error) {
	dir, address, err := n.ueventAddress()
	if err != nil {
		return nil, fmt.Errorf("listen to uevents: %w", err)
	}
	defer dir.Close()
	if err := os.Remove(filepath.Join(n.root, ownDir, ueventSocket)); err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, fmt.Errorf("listen to uevents: %w", err)
	}
	conn, err := net.ListenUnixgram("unixgram", address)
	if err != nil {
		return nil, fmt.Errorf("listen to uevents: %w", err)
	}
	return conn, nil
}

// ueventAddress returns the socket's address by the open directory, since the path may be too long for an address.
func (n *Node) ueventAddress() (*os.File, *net.UnixAddr, error) {
	dir, err := os.Open(filepath.Join(n.root, ownDir))
	if err != nil {
		return nil, nil, err
	}
	return dir, &net.UnixAddr{Name: fmt.Sprintf("/proc/self/fd/%d/%s", dir.Fd(), ueventSocket), Net: "unixgram"}, nil
}

// sendUevents sends messages to the reader, if there is one, and appends them to the record.
func (n *Node) sendUevents(events []uevent) error {
	sequence := time.Now().UnixNano()
	var messages [][]byte
	for i, e := range events {
		messages = append(messages, e.message(sequence+int64(i)))
	}
	if err := n.logUevents(messages); err != nil {
		return fmt.Errorf("record uevents: %w", err)
	}
	dir, address, err := n.ueventAddress()
	if err != nil {
		return fmt.Errorf("send uevents: %w", err)
	}
	defer dir.Close()
	conn, err := net.DialUnix("unixgram", nil, address)
	if errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ECONNREFUSED) {
		return nil // there is no reader
	}
	if err != nil {
		return fmt.Errorf("send uevents: %w", err)
	}
	defer conn.Close()
	if err := conn.SetWriteDeadline(time.Now().Add(ueventTimeout)); err != nil {
		return fmt.Errorf("send uevents: %w", err)
	}
	for _, m := range messages {
		if _, err := conn.Write(m); err != nil && !errors.Is(err, unix.ECONNREFUSED) {
			return fmt.Errorf("send uevents: %w", err)
		}
	}
	return nil
}

func (n *Node) logUevents(messages [][]byte) error {
	f, err := os.OpenFile(filepath.Join(n.root, ueventLog), os.O_WRONLY|os.O_CREATE|os.O_APPEND, 0o644)
	if err != nil {
		return err
	}
	for _, m := range messages {
		text := strings.ReplaceAll(string(m), "\x00", "\n") + "\n"
		if _, err := f.WriteString(text); err != nil {
			return errors.Join(err, f.Close())
		}
	}
	return f.Close()
}
