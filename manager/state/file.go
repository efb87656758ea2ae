package state

import (
	"bytes"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"gpu-cdi-plugin/internal/fileio"
	"gpu-cdi-plugin/internal/trust"
	"gpu-cdi-plugin/manager/model"
)

// OldName is the name of the file in which earlier versions kept the placements. It is not read.
const OldName = "manager.db"

const (
	version  = 1
	fileMode = 0o600
	// maxSize is in bytes. A placement usually has one kilobyte, or more if its plugin sends much.
	maxSize = 256 << 20
)

// content is the content of a file.
type content struct {
	placements []record // in the order of admission
	resources  []string
	loss       *Loss
}

// record is the placement of a pod.
type record struct {
	uid  string
	data json.RawMessage
}

func newRecord(p model.Placement) (record, error) {
	data, err := json.Marshal(p)
	return record{p.Pod.UID, data}, err
}

func (c *content) clone() content {
	clone := *c
	clone.placements = slices.Clone(c.placements)
	return clone
}

func (c *content) index(uid string) int {
	return slices.IndexFunc(c.placements, func(r record) bool { return r.uid == uid })
}

func (c *content) put(r record) {
	if i := c.index(r.uid); i >= 0 {
		c.placements[i] = r
	} else {
		c.placements = append(c.placements, r)
	}
}

func (c *content) remove(uid string) {
	if i := c.index(uid); i >= 0 {
		c.placements = slices.Delete(c.placements, i, i+1)
	}
}

// format returns the text of a file: a checksum, and the state to which it belongs. Each placement has a line.
func (c *content) format() ([]byte, error) {
	resources, err := json.Marshal(c.resources)
	if err != nil {
		return nil, err
	}
	loss, err := json.Marshal(c.loss)
	if err != nil {
		return nil, err
	}
	var b bytes.Buffer
	fmt.Fprintf(&b, "{\n\"version\": %d,\n\"resources\": %s,\n\"loss\": %s,\n\"placements\": [",
		version, resources, loss)
	for i, r := range c.placements {
		if i > 0 {
			b.WriteByte(',')
		}
		b.WriteByte('\n')
		b.Write(r.data)
	}
	b.WriteString("\n]}")
	return sign(b.Bytes()), nil
}

// sign returns the text of a file with this state: a checksum of the state, and then the state.
func sign(state []byte) []byte {
	return fmt.Appendf(nil, "{\"checksum\": \"%x\", \"state\": %s}\n", sha256.Sum256(state), state)
}

// verify returns the state in the text of a file. It returns an error if the checksum does not match.
func verify(text []byte) ([]byte, error) {
	const end = "}\n"
	begin := len(sign(nil)) - len(end)
	if len(text) < begin+len(end) {
		return nil, errors.New("it is cut short")
	}
	state := text[begin : len(text)-len(end)]
	if !bytes.Equal(text, sign(state)) {
		return nil, errors.New("its checksum does not match")
	}
	return state, nil
}

// parse reads the text of a file. If the checksum matches, but the file has a newer format, the error wraps ErrNewer.
func parse(text []byte) (content, Loaded, error) {
	state, err := verify(text)
	if err != nil {
		return content{}, Loaded{}, err
	}
	var s struct {
		Version    int
		Resources  []string
		Loss       *Loss
		Placements []model.Placement
	}
	err = json.Unmarshal(state, &s)
	if s.Version > version { // whatever else the file has
		return content{}, Loaded{}, fmt.Errorf("%w: its format is %d, the newest known one is %d",
			ErrNewer, s.Version, version)
	}
	if err != nil {
		return content{}, Loaded{}, err
	}
	c := content{resources: s.Resources, loss: s.Loss}
	seen := map[string]bool{}
	for _, p := range s.Placements {
		uid := p.Pod.UID
		if uid == "" || seen[uid] {
			return content{}, Loaded{}, fmt.Errorf("a pod has no UID, or the UID of another pod: %q", uid)
		}
		seen[uid] = true
		r, err := newRecord(p)
		if err != nil {
			return content{}, Loaded{}, err
		}
		c.placements = append(c.placements, r)
	}
	return c, Loaded{Resources: s.Resources, Loss: s.Loss, Placements: s.Placements}, nil
}

// load reads the file. If the file is missing, load creates it. If the checksum does not match, load sets the file
// aside and creates a new one.
func load(path string, log *slog.Logger, earlier []string) (content, Loaded, error) {
	data, err := read(path)
	if errors.Is(err, fs.ErrNotExist) {
		return begin(path, findOld(append(earlier, filepath.Join(filepath.Dir(path), OldName)), log))
	}
	if err != nil {
		return content{}, Loaded{}, err
	}
	c, loaded, err := parse(data)
	if err == nil || errors.Is(err, ErrNewer) {
		return c, loaded, err
	}
	loss, err := setAside(path, err, log)
	if err != nil {
		return content{}, Loaded{}, err
	}
	return begin(path, loss)
}

// read reads a file. If other users can change it, that is an error.
func read(path string) ([]byte, error) {
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	data, _, err := fileio.ReadRegular(f, maxSize)
	if err != nil {
		return nil, err
	}
	return data, trust.File(path)
}

// begin makes a file without placements.
func begin(path string, loss *Loss) (content, Loaded, error) {
	c := content{loss: loss}
	data, err := c.format()
	if err != nil {
		return content{}, Loaded{}, err
	}
	if err := fileio.WriteDurably(path, data, fileMode); err != nil {
		return content{}, Loaded{}, err
	}
	return c, Loaded{Loss: loss}, nil
}

const previousSuffix = ".previous"

// keepPrevious keeps the file that is about to be replaced, for people. This program does not read it.
func keepPrevious(path string) {
	_ = os.Remove(path + previousSuffix)
	_ = os.Link(path, path+previousSuffix)
}

const lost = "the placements are lost: unknown pods may hold devices, so all devices are withheld until an " +
	"administrator frees them: device-manager release --withheld"

// setAside gives a damaged file another name, which no earlier damaged file has. It moves the previous file to the
// same place.
func setAside(path string, damage error, log *slog.Logger) (*Loss, error) {
	now := time.Now().UTC().Round(0)
	aside := path + ".damaged-" + now.Format("20060102T150405.000000000Z")
	if err := os.Link(path, aside); err != nil {
		return nil, fmt.Errorf("set the damaged file aside: %w", err)
	}
	_ = os.Rename(path+previousSuffix, aside+previousSuffix) // for people; it may not exist
	log.Error(lost, "damaged file", path, "set aside as", aside, "error", damage)
	return &Loss{Time: now, Reason: damage.Error(), File: aside}, nil
}

// findOld returns the loss of the placements of an earlier version, if the file of that version is at one of the
// paths, and otherwise nil.
func findOld(paths []string, log *slog.Logger) *Loss {
	for _, old := range paths {
		if _, err := os.Lstat(old); errors.Is(err, fs.ErrNotExist) {
			continue
		}
		log.Error(lost, "file of an earlier version", old)
		return &Loss{
			Time: time.Now().UTC().Round(0), File: old,
			Reason: "this version does not read the placements of an earlier version",
		}
	}
	return nil
}
