package plugin

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"google.golang.org/protobuf/proto"
	"k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"gpu-cdi-plugin/internal/lazy"
)

// sweepAge is how old an allocation's file must be before it is removed: an allocation that the kubelet has been
// answered is in its checkpoint a moment later only.
const sweepAge = time.Hour

// sweepEvery is how often old files are looked for.
const sweepEvery = time.Hour

// checkpointName is the kubelet's file of the devices that it gave to pods.
const checkpointName = "kubelet_internal_checkpoint"

// fileForm is the name of an allocation's file, and of one that was never whole.
var fileForm = lazy.Regexp(`^([0-9a-f]{32}\.json|\.[0-9a-f]{32}\.json\..*\.tmp)$`)

// sweeper removes the files of allocations that no pod has any more. It is an actor.
type sweeper struct {
	dir        string // of the allocations
	checkpoint string // the kubelet's
	log        *slog.Logger
	failed     string // why old files stayed the last time
}

// run sweeps now and then until ctx ends.
func (s *sweeper) run(ctx context.Context) error {
	ticker := time.NewTicker(sweepEvery)
	defer ticker.Stop()
	for {
		s.report(s.sweep(time.Now()))
		select {
		case <-ctx.Done():
			return nil
		case <-ticker.C:
		}
	}
}

// report logs an error when it begins and when it ends.
func (s *sweeper) report(err error) {
	before := s.failed
	s.failed = ""
	if err != nil {
		s.failed = strings.ReplaceAll(err.Error(), "\n", "; ")
	}
	switch {
	case s.failed == before:
	case err != nil:
		s.log.Warn("files of old allocations stay in " + s.dir + ": " + s.failed)
	default:
		s.log.Info("files of old allocations in " + s.dir + " are removed again")
	}
}

// sweep removes what the checkpoint does not mount. If that cannot be read whole, or if the kubelet has none, nothing
// goes.
func (s *sweeper) sweep(now time.Time) error {
	needed, err := mountedBy(s.checkpoint)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("remove old allocations: %w", err)
	}
	entries, err := os.ReadDir(s.dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("remove old allocations: %w", err)
	}
	var errs []error
	for _, e := range entries {
		path := filepath.Join(s.dir, e.Name())
		if !needed[path] && isOld(e, now) {
			errs = append(errs, os.Remove(path))
		}
	}
	return errors.Join(errs...)
}

// isOld reports whether the entry is a file of an allocation, or what is left of one half written, and not new.
func isOld(e fs.DirEntry, now time.Time) bool {
	info, err := e.Info()
	return err == nil && info.Mode().IsRegular() && fileForm().MatchString(e.Name()) && now.Sub(info.ModTime()) > sweepAge
}

// checkpoint is what is of interest here in the kubelet's file of devices, kubelet_internal_checkpoint.
type checkpoint struct {
	Data *struct {
		PodDeviceEntries []struct {
			AllocResp []byte
		}
	}
}

// mountedBy are the host paths that the answers in a checkpoint mount.
func mountedBy(path string) (map[string]bool, error) {
	answers, err := readCheckpoint(path)
	if err != nil {
		return nil, err
	}
	paths := map[string]bool{}
	for _, a := range answers {
		for _, m := range a.GetMounts() {
			paths[m.GetHostPath()] = true
		}
	}
	return paths, nil
}

// Given reports whether a pod of the kubelet with that directory of device plugins was given CDI devices of a kind.
func Given(dir, kind string) (bool, error) {
	answers, err := readCheckpoint(filepath.Join(cmp.Or(dir, v1beta1.DevicePluginPath), checkpointName))
	if err != nil {
		return false, fmt.Errorf("look who was given %s: %w", kind, err)
	}
	for _, a := range answers {
		if slices.ContainsFunc(cdiNamesIn(a), func(name string) bool { return strings.HasPrefix(name, kind+"=") }) {
			return true, nil
		}
	}
	return false, nil
}

// cdiNamesIn are the CDI devices of an answer, in whichever way they are in it. The prefix of annotations is configurable,
// and may have been another one.
func cdiNamesIn(a *v1beta1.ContainerAllocateResponse) []string {
	var names []string
	for _, d := range a.GetCdiDevices() {
		names = append(names, d.GetName())
	}
	for _, value := range a.GetAnnotations() {
		names = append(names, strings.Split(value, ",")...)
	}
	return names
}

func readCheckpoint(path string) ([]*v1beta1.ContainerAllocateResponse, error) {
	content, err := checkpointContent(path)
	if err != nil {
		return nil, err
	}
	answers, err := parseCheckpoint(content)
	if err != nil {
		return nil, fmt.Errorf("read %s: %w", path, err)
	}
	return answers, nil
}

func parseCheckpoint(content []byte) ([]*v1beta1.ContainerAllocateResponse, error) {
	var c checkpoint
	if err := json.Unmarshal(content, &c); err != nil {
		return nil, err
	}
	if c.Data == nil {
		return nil, errors.New("it has no data")
	}
	answers := make([]*v1beta1.ContainerAllocateResponse, len(c.Data.PodDeviceEntries))
	for i, e := range c.Data.PodDeviceEntries {
		answers[i] = &v1beta1.ContainerAllocateResponse{}
		if err := proto.Unmarshal(e.AllocResp, answers[i]); err != nil {
			return nil, fmt.Errorf("an allocation in it: %w", err)
		}
	}
	return answers, nil
}
