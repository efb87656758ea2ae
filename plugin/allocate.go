package plugin

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
)

// Allocate answers how the runtime gives the devices to each container. The codes of its errors are
//
//	InvalidArgument     no device, a device twice, or more devices than the resource allows a container
//	NotFound            a device that is not in the list
//	FailedPrecondition  a device that is unhealthy
//	Unavailable         the CDI spec on disk does not have the devices now
//	Internal            the allocation's file cannot be written
func (s *server) Allocate(_ context.Context, req *v1beta1.AllocateRequest) (*v1beta1.AllocateResponse, error) {
	begin := time.Now()
	l, count := s.list.Load(), 0
	var wire []byte
	for _, c := range req.GetContainerRequests() {
		answer, err := s.allocate(l, c.GetDevicesIds())
		if err != nil {
			s.log.Warn("an allocation was refused: " + status.Convert(err).Message())
			s.observer.Allocated(l.resource.Name, status.Code(err), 0, time.Since(begin))
			return nil, err
		}
		wire = append(wire, answer...) // messages that follow each other are one, with the containers of all
		count += len(c.GetDevicesIds())
	}
	s.observer.Allocated(l.resource.Name, codes.OK, count, time.Since(begin))
	return encoded(wire), nil
}

// allocate is the answer for one container, encoded. It must not be changed.
func (s *server) allocate(l *list, ids []string) ([]byte, error) {
	devices, err := l.find(ids)
	if err != nil {
		return nil, err
	}
	var room [64]byte
	key := keyOf(room[:0], devices)
	p := l.answered.get(key)
	if p != nil && s.current(p) {
		return p.wire, s.inSpec(p.names)
	}
	if p, err = s.prepare(l, devices); err != nil {
		return nil, err
	}
	l.answered.put(key, p)
	return p.wire, nil
}

// find returns the devices of the IDs in the order of the list, or an error that names every ID that cannot be had.
func (l *list) find(ids []string) ([]*device, error) {
	name, limit := l.resource.Name, l.resource.Limit
	if len(ids) == 0 {
		return nil, status.Errorf(codes.InvalidArgument, "allocate %s: a container asks for no device", name)
	}
	if limit > 0 && len(ids) > limit {
		return nil, status.Errorf(codes.InvalidArgument,
			"allocate %s: a container asks for %d devices, and may have %d; %s", name, len(ids), limit, l.resource.LimitReason)
	}
	devices, err := l.healthyOnes(ids)
	if err != nil {
		return nil, err
	}
	slices.SortFunc(devices, func(a, b *device) int { return a.place - b.place })
	var twice someOf
	for i := 1; i < len(devices); i++ {
		if devices[i] == devices[i-1] {
			twice.add(devices[i].ID, "")
		}
	}
	if twice.n > 0 {
		return nil, status.Errorf(codes.InvalidArgument, "allocate %s: asked for twice: %s", name, &twice)
	}
	return devices, nil
}

func (l *list) healthyOnes(ids []string) ([]*device, error) {
	devices := make([]*device, 0, len(ids))
	var unknown, unhealthy someOf
	for _, id := range ids {
		switch d := l.devices[id]; {
		case d == nil:
			unknown.add(id, "")
		case !d.Healthy:
			unhealthy.add(id, d.Reason)
		default:
			devices = append(devices, d)
		}
	}
	switch {
	case unknown.n > 0:
		return nil, status.Errorf(codes.NotFound, "allocate %s: no such device: %s", l.resource.Name, &unknown)
	case unhealthy.n > 0:
		return nil, status.Errorf(codes.FailedPrecondition, "allocate %s: unhealthy: %s", l.resource.Name, &unhealthy)
	}
	return devices, nil
}

// distinct are the GPUs and MIG devices behind the devices: of several replicas of one, the first. In a list replicas of
// a device follow each other, and the devices are in that order.
func distinct(devices []*device) []*device {
	return slices.CompactFunc(slices.Clone(devices), func(a, b *device) bool { return a.UUID == b.UUID })
}

// someOf is a list of names for a message: the first few, and how many there are.
type someOf struct {
	n    int
	text strings.Builder
}

// Names come from whoever calls; a message holds a few, each cut to a length that every real one has.
const (
	namesInMessage = 8
	nameInMessage  = 80
)

func (s *someOf) add(name, why string) {
	s.n++
	if s.n > namesInMessage {
		return
	}
	if s.n > 1 {
		s.text.WriteString(", ")
	}
	if len(name) > nameInMessage {
		name = name[:nameInMessage] + "..."
	}
	fmt.Fprintf(&s.text, "%q", name)
	if why != "" {
		s.text.WriteString(" (" + why + ")")
	}
}

func (s *someOf) String() string {
	if more := s.n - namesInMessage; more > 0 {
		return fmt.Sprintf("%s and %d more", s.text.String(), more)
	}
	return s.text.String()
}
