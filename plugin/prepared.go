package plugin

import (
	"encoding/binary"
	"slices"
	"sync"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
	specs "tags.cncf.io/container-device-interface/specs-go"
)

// prepared is what a container that is given some devices of a list gets. It is made once and stays right as long as what
// it was made of does; what is on disk has to be looked at each time.
type prepared struct {
	spec   *specs.Spec   // that device nodes and mounts are from, or nil
	extras []*specs.Spec // that the container gets besides
	names  []string      // qualified CDI names in it, which the specs on disk must have
	file   allocationFile
	wire   []byte // an AllocateResponse with this container alone, encoded
}

// prepare makes the answer, and the allocation's file.
func (s *server) prepare(l *list, devices []*device) (*prepared, error) {
	p := &prepared{spec: s.answers.spec(), extras: s.answers.extras()}
	whole := distinct(devices)
	if s.answers.Specs != nil && s.answers.byCDIName() {
		p.names = namesOf(whole, p.extras)
	}
	if err := s.inSpec(p.names); err != nil {
		return nil, err
	}
	c := &v1beta1.ContainerAllocateResponse{}
	for _, strategy := range s.answers.Strategies {
		if err := s.answer(c, strategy, whole, p); err != nil {
			return nil, err
		}
	}
	s.answers.addMPS(c, whole)
	var err error
	if p.file.path, err = s.allocations.write(l.resource.Name, devices, p.extras); err != nil {
		return nil, status.Errorf(codes.Internal, "allocate %s: %v", l.resource.Name, err)
	}
	c.Mounts = append(c.Mounts, allocationMounts(l.resource.Name, p.file.path)...)
	p.wire, err = proto.Marshal(&v1beta1.AllocateResponse{ContainerResponses: []*v1beta1.ContainerAllocateResponse{c}})
	return p, err
}

// current reports whether the answer is made of what it would be made of now, and its file is there.
func (s *server) current(p *prepared) bool {
	return p.spec == s.answers.spec() && slices.Equal(p.extras, s.answers.extras()) && s.allocations.has(&p.file)
}

// inSpec asks whether the CDI specs on disk have the devices.
func (s *server) inSpec(names []string) error {
	if len(names) == 0 {
		return nil
	}
	if err := s.answers.Specs.SpecHas(names...); err != nil {
		return status.Errorf(codes.Unavailable, "allocate %s: %v", s.name(), err)
	}
	return nil
}

// encoded is a message that is encoded already. Protobuf writes fields that it does not know as they came, so the fields of
// the message are not looked at again; nor can they be here, before somebody has read it.
func encoded(wire []byte) *v1beta1.AllocateResponse {
	m := &v1beta1.AllocateResponse{}
	m.ProtoReflect().SetUnknown(wire)
	return m
}

// preparedMost is how many answers a list keeps, of a kilobyte or so: all for eight devices.
const preparedMost = 256

// answered are the prepared answers of a list, by their devices.
type answered struct {
	mu sync.RWMutex
	of map[string]*prepared
}

func (a *answered) get(key []byte) *prepared {
	a.mu.RLock()
	defer a.mu.RUnlock()
	return a.of[string(key)]
}

func (a *answered) put(key []byte, p *prepared) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.of == nil || len(a.of) >= preparedMost {
		a.of = map[string]*prepared{}
	}
	a.of[string(key)] = p
}

// keyOf appends what tells some devices of a list from others.
func keyOf(key []byte, devices []*device) []byte {
	for _, d := range devices {
		key = binary.AppendUvarint(key, uint64(d.place))
	}
	return key
}
