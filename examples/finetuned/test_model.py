from model import classifier

from veriformer.properties import parametrize

test_classifier = parametrize(classifier, profile="quick")
