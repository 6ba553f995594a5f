import modal
import pytest

from tests.launch.modal_service import ModalService


@pytest.fixture(scope="module")
def _service(tmp_path_factory):
    service = ModalService()
    with pytest.MonkeyPatch.context() as given:
        given.setenv("MODAL_SERVER_URL", service.address)
        given.setenv("MODAL_CONFIG_PATH", str(tmp_path_factory.mktemp("modal") / "none"))
        given.setenv("MODAL_TOKEN_ID", "ak-1")
        given.setenv("MODAL_TOKEN_SECRET", "as-1")
        client = modal.Client.from_env()
        yield service
        client.close()
    service.close()


@pytest.fixture
def service(_service):
    """The service that Modal's client talks to, with nothing said yet."""
    _service.calls.clear()
    _service.volumes.clear()
    return _service
